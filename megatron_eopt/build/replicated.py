"""Optimizers of whole parameters, or of each tensor-parallel slab: one member of a chain."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.build.bases import Base, Share, build_base, shares_of
from megatron_eopt.build.chain import OptimizerChain
from megatron_eopt.build.loss_scale import make_scaler
from megatron_eopt.build.storages import Wanted
from megatron_eopt.optimizers.driver import Driver, refuse_group
from megatron_eopt.optimizers.element_wise import ElementWiseDriver, SlabDriver
from megatron_eopt.optimizers.member import Member
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.routing.model import Routing
from megatron_eopt.settings.fields import constructor_arguments
from megatron_eopt.settings.registry import entry_of
from megatron_eopt.settings.settings import Settings
from megatron_eopt.stores.interface import Storage
from megatron_eopt.stores.replicated import (
    Float32Optimizer,
    MainParamsOptimizer,
    tensor_parallel_cut,
)
from megatron_eopt.stores.shard import Ranks


def chain_of_slabs(
    wanted: Wanted, storage_of: Callable[..., Storage] | None = None
) -> OptimizerChain | None:
    """Return the chain that steps whole parameters, or each tensor-parallel slab.

    Args:
        wanted: What to serve.
        storage_of: Called as ``(optimizer, config, init_state_fn)`` in place of our own storages;
            the model is then served whatever the configuration says.
    """
    settings, chunks = wanted.settings, wanted.model_chunks
    if storage_of is None and settings.storage != "replicated":
        return None
    scaler = make_scaler(settings.loss_scale) if settings.half else None
    if storage_of is None:
        if not settings.half:
            _check_dtypes(wanted.routing)
        storage_of = functools.partial(_main_params, scaler) if settings.half else Float32Optimizer
    members = []
    for share in shares_of(wanted.routing.groups, settings.optimizer, len(chunks)):
        matrices = wanted.routing.matrices
        base = build_base(share, settings, chunks, wanted.collection, splits=matrices)
        if base is not None and base.layout == "matrix_state":
            _check_whole(share, wanted.routing)
        members.append(_member(base, share, wanted, storage_of))
    return OptimizerChain(members, settings, scaler, chunks)


def _check_dtypes(routing: Routing) -> None:
    for param, name in routing.names.items():
        if param.dtype in (torch.bfloat16, torch.float16):
            field = "bf16" if param.dtype == torch.bfloat16 else "fp16"
            rule = f"{name} is {param.dtype}, and there would be no float32 weights to step"
            raise ConfigurationError(field, False, rule, f"Set {field}=True")


def _check_whole(share: Share, routing: Routing) -> None:
    """Raise if a parameter declares matrices that its optimizer steps as one."""
    if "splits" in constructor_arguments(entry_of(share.optimizer).optimizer_cls):
        return
    for item in (route.parameter for group in share.groups for route in group.members):
        declared = getattr(item.param, "eopt_split", None)
        split = routing.splits.get(item.param)
        several = split is not None and sum(part.count for part in split.parts) > 1
        if declared is not None and several:
            rule = f"{share.optimizer} steps whole parameters where every rank stores them"
            way_out = "Set use_distributed_optimizer=True, or leave eopt_split out"
            raise ConfigurationError(f"{item.name}.eopt_split", declared, rule, way_out)


def _main_params(scaler: Any, optimizer: Any, config: Any, init_state_fn: Any) -> Storage:
    return MainParamsOptimizer(optimizer, config, scaler, init_state_fn)


def _member(
    base: Base | None, share: Share, wanted: Wanted, storage_of: Callable[..., Storage]
) -> Member:
    settings, collection = wanted.settings, wanted.collection
    optimizer: Any = None if base is None else base.optimizer
    made_early = base is not None and bool(optimizer.state)
    if made_early:
        # made for the model's parameters, which the wrapper may replace by main ones
        optimizer.state.clear()
    init_state_fn = base and base.init_state_fn
    storage = storage_of(optimizer, settings.config, init_state_fn)
    name = "tp_ep_pp" if share.is_expert else "mp"
    storage.count_in(getattr(collection, name, collection.mp), collection)
    if base is None:
        return Member(storage)
    stored = list(storage.stored())
    if isinstance(optimizer, TensorParallelMuon):
        optimizer.follow({item.main: item.param for item in stored})
    params = [item.param for item in stored]
    driver = _driver(base, params, settings, collection)
    driver.is_clipped = base.is_clipped
    if made_early or base.layout == "matrix_update":
        driver.init(optimizer.param_groups, optimizer.state)
    optimizer.add_param_group = refuse_group
    return Member(storage, [driver], [params])


def _driver(base: Base, params: list[Tensor], settings: Settings, collection: Any) -> Driver:
    optimizer, init_state_fn = base.optimizer, base.init_state_fn
    if base.layout == "matrix_update":
        planned: Driver = optimizer.plan()
        return planned
    if base.layout == "element_wise":
        driver = ElementWiseDriver(optimizer, init_state_fn, settings.config)
    else:
        ranks = [Ranks.of(tensor_parallel_cut(param, collection)[1]) for param in params]
        driver = SlabDriver(optimizer, init_state_fn, settings.config, ranks=ranks)
    count = itertools.count()
    driver.attach([[next(count) for _ in group["params"]] for group in optimizer.param_groups])
    return driver
