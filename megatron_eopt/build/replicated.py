"""Optimizers of whole parameters, or of each tensor-parallel slab: one member of a chain."""

from typing import Any

from torch import Tensor
from torch import distributed as dist

from megatron_eopt.build.bases import Base, Share
from megatron_eopt.optimizers.driver import Driver, fixed
from megatron_eopt.optimizers.element_wise import ElementWiseDriver, SlabDriver
from megatron_eopt.optimizers.member import Member
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.settings.settings import Settings
from megatron_eopt.stores.replicated import (
    Float32Optimizer,
    MainParamsOptimizer,
    tensor_parallel_cut,
)


def replicated_member(
    base: Base | None, share: Share, settings: Settings, collection: Any, scaler: Any
) -> Member:
    """Return the member that steps a share.

    Args:
        base: Its torch optimizer; None without groups.
        share: The share.
        settings: The configuration.
        collection: Megatron's process groups.
        scaler: The loss scale of the chain; None without.
    """
    if base is None:
        return Member(_storage(None, None, share, settings, collection, scaler))
    optimizer = base.optimizer
    made_early = bool(optimizer.state)
    # made for the model's parameters, which the wrapper may replace by main ones
    optimizer.state.clear()
    storage = _storage(optimizer, base.init_state_fn, share, settings, collection, scaler)
    if isinstance(optimizer, TensorParallelMuon):
        # the chain has looked at the gradient norm when its members step
        optimizer.check_finite = False
    params = [item.param for item in storage.stored()]
    driver = _driver(base, params, settings, collection)
    driver.is_clipped = base.is_clipped
    if made_early:
        driver.init(optimizer.param_groups, optimizer.state)
    optimizer.add_param_group = _refuse
    return Member(storage, [driver], [params])


def _storage(
    optimizer: Any,
    init_state_fn: Any,
    share: Share,
    settings: Settings,
    collection: Any,
    scaler: Any,
) -> Any:
    storage: Any
    if settings.half:
        storage = MainParamsOptimizer(optimizer, settings.config, scaler, init_state_fn)
    else:
        storage = Float32Optimizer(optimizer, settings.config, init_state_fn)
    name = "tp_ep_pp" if share.is_expert else "mp"
    storage.grad_stats_parallel_group = getattr(collection, name, collection.mp)
    storage.tp_group = collection.tp
    storage.expert_tp_group = getattr(collection, "expt_tp", collection.tp)
    return storage


def _driver(base: Base, params: list[Tensor], settings: Settings, collection: Any) -> Driver:
    optimizer, init_state_fn = base.optimizer, base.init_state_fn
    if base.layout == "matrix_update":
        planned: Driver = optimizer.driver
        return planned
    if base.layout == "element_wise":
        driver = ElementWiseDriver(optimizer, init_state_fn, settings.config)
    else:
        slabs = [_slab(param, collection) for param in params]
        driver = SlabDriver(optimizer, init_state_fn, settings.config, slabs)
    count = iter(range(len(params)))
    driver.attach([[next(count) for _ in group["params"]] for group in optimizer.param_groups])
    return driver


def _slab(param: Tensor, collection: Any) -> tuple[int, int]:
    group = tensor_parallel_cut(param, collection)[1]
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def _refuse(param_group: dict[str, Any]) -> None:
    raise fixed("add_param_group", f"{len(list(param_group.get('params', ())))} parameters")
