"""Which driver steps a torch optimizer's parameters over given shards."""

import functools
from collections.abc import Mapping, Sequence
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
    shards: Mapping[Tensor, Shard],
    means: Means,
    config: Any,
) -> Driver:
    """Return the driver of an optimizer that needs matrices; collective over the shards' ranks.

    ``groups`` and ``shards`` are those of the model's parameters.
    """
    driver: Driver
    if base.layout == "matrix_update":
        driver = base.optimizer.driver_over(list(shards.values()), means)
    else:
        # what has other dimensions travels as a matrix, and steps in its own
        shapes = [
            shard.layouts[0].shape
            if param.dim() == 2
            else (shard.layouts[0].shape[0], *param.shape[1:])
            for param, shard in shards.items()
        ]
        init = base.init_state_fn and functools.partial(base.init_state_fn, base.optimizer, config)
        driver = OwnerDriver(base.optimizer, init, list(shards.values()), shapes, means)
    group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
    driver.assign({number: group_of[param] for number, param in enumerate(shards)})
    return driver
