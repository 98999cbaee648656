"""Which driver steps a torch optimizer's parameters over given shards."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_eopt.build.bases import Base
from megatron_eopt.optimizers.driver import Driver, ParamGroup
from megatron_eopt.optimizers.engine import Means
from megatron_eopt.optimizers.owner_driver import OwnerDriver
from megatron_eopt.stores.shard import Shard


def driver_over(
    base: Base,
    groups: Sequence[ParamGroup],
    params: Sequence[Tensor],
    shards: Sequence[Shard],
    means: Means,
    config: Any,
) -> Driver:
    """Return the driver of an optimizer that needs matrices; collective over the shards' ranks.

    Args:
        base: The optimizer.
        groups: Its parameter groups there, of the model's parameters.
        params: The model's parameters, in the order of ``shards``.
        shards: How the ranks store them.
        means: How matrices travel.
        config: What functions that make state get.
    """
    driver = _driver(base, params, shards, means, config)
    group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
    driver.assign({number: group_of[param] for number, param in enumerate(params)})
    return driver


def _driver(
    base: Base, params: Sequence[Tensor], shards: Sequence[Shard], means: Means, config: Any
) -> Driver:
    if base.layout == "matrix_update":
        planned: Driver = base.optimizer.driver_over(shards, means)
        return planned
    shapes = []
    for param, shard in zip(params, shards, strict=True):
        # what has other dimensions travels as a matrix, and steps in its own
        rows, cols = shard.layouts[0].shape
        shapes.append((rows, cols) if param.dim() == 2 else (rows, *param.shape[1:]))
    return OwnerDriver(base.optimizer, base.init_state_fn, config, shards, shapes, means)
