"""Build the chain in which every data-parallel rank steps whole parameters or tensor shards."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.config.fields import constructor_arguments
from megatron_eopt.config.registry import entry_of
from megatron_eopt.config.settings import Settings
from megatron_eopt.optimizers.driver import Driver, refuse_group
from megatron_eopt.optimizers.element_wise import ElementWiseDriver, SlabDriver
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.stepper import Stepper
from megatron_eopt.routing.model import Routing
from megatron_eopt.routing.parameters import check_dtypes
from megatron_eopt.storage import replicated
from megatron_eopt.storage.interface import Storage
from megatron_eopt.storage.shard import Ranks
from megatron_eopt.wrappers.bases import Base, bases_of
from megatron_eopt.wrappers.builders import Wanted
from megatron_eopt.wrappers.chain import OptimizerChain
from megatron_eopt.wrappers.gradients import make_scaler


def chain_of_slabs(
    wanted: Wanted, storage_of: Callable[..., Storage] | None = None
) -> OptimizerChain | None:
    """Return the chain that steps whole parameters, or whole tensor-parallel shards.

    Args:
        wanted: Settings, routing and model. Without ``storage_of``, the result is None unless the
            settings ask for this storage.
        storage_of: Storage class to use instead of the built-in ones; called as
            ``(optimizer, config, init_state_fn=...)``.
    """
    settings, chunks = wanted.settings, wanted.model_chunks
    if storage_of is None and settings.storage != "replicated":
        return None
    scaler = make_scaler(settings.loss_scale) if settings.half else None
    if storage_of is None:
        what = f"Mixed precision ({settings.half})" if settings.half else "Megatron's DDP"
        check_dtypes(wanted.routing.names, what, double=not settings.half)
        if settings.half:
            storage_of = functools.partial(replicated.MainParamsOptimizer, grad_scaler=scaler)
        else:
            _check_half(wanted.routing)
            storage_of = replicated.Float32Optimizer
    bases = bases_of(settings, wanted.routing, chunks, wanted.collection)
    steppers = [_stepper(base, wanted, storage_of) for base in bases]
    return OptimizerChain(steppers, settings, scaler, chunks)


def _check_half(routing: Routing) -> None:
    for param, name in routing.names.items():
        if param.dtype in (torch.bfloat16, torch.float16):
            field = "bf16" if param.dtype == torch.bfloat16 else "fp16"
            rule = f"{name} is {param.dtype}, so the optimizer needs float32 main weights"
            raise ConfigurationError(field, False, rule, f"Set {field}=True")


def _check_whole(base: Base, routing: Routing) -> None:
    """Raise if a parameter declares several matrices but its optimizer would step it as one."""
    if "splits" in constructor_arguments(entry_of(base.name).optimizer_cls):
        return
    for item in (route.parameter for route in routing.routes if route.optimizer == base.name):
        declared = getattr(item.param, "eopt_split", None)
        split = routing.splits.get(item.param)
        several = split is not None and sum(part.count for part in split.parts) > 1
        folded = split is not None and len(split.shape) != item.param.dim()
        if folded or (declared is not None and several):
            rule = f"{base.name} does not split parameters without use_distributed_optimizer"
            way_out = "Set use_distributed_optimizer=True, or remove eopt_split"
            raise ConfigurationError(f"{item.name}.eopt_split", declared, rule, way_out)


def _stepper(base: Base, wanted: Wanted, storage_of: Callable[..., Storage]) -> Stepper:
    settings, collection, optimizer = wanted.settings, wanted.collection, base.optimizer
    made_early = optimizer is not None and bool(optimizer.state)
    if made_early:
        # this state is for the model's parameters, which the wrapper may replace by main weights
        optimizer.state.clear()
    storage = storage_of(optimizer, settings.config, init_state_fn=base.init_state_fn)
    name = "tp_ep_pp" if base.is_expert else "mp"
    storage.count_in(getattr(collection, name, collection.mp), collection)
    if optimizer is None:
        return Stepper(storage)
    if base.layout == "matrix_state":
        _check_whole(base, wanted.routing)
    stored = list(storage.stored())
    if isinstance(optimizer, TensorParallelMuon):
        optimizer.follow({item.main: item.param for item in stored})
    drivers = _drivers(base, [item.param for item in stored], settings, collection)
    model_of = {item.main: item.param for item in stored}
    params = []
    for driver in drivers:
        driver.is_clipped = base.is_clipped
        if made_early or base.layout == "matrix_update":
            driver.init(optimizer.param_groups, optimizer.state)
        params.append([model_of[main] for _, main, _ in driver.numbered(optimizer.param_groups)])
    optimizer.add_param_group = refuse_group
    return Stepper(storage, drivers, params)


def _drivers(
    base: Base, params: list[Tensor], settings: Settings, collection: Any
) -> Sequence[Driver]:
    optimizer, init_state_fn = base.optimizer, base.init_state_fn
    if base.layout == "matrix_update":
        planned: list[Driver] = optimizer.plan()
        return planned
    if base.layout == "element_wise":
        driver = ElementWiseDriver(optimizer, init_state_fn, settings.config)
    else:
        ranks = [Ranks.of(replicated.tensor_parallel_cut(param, collection)[1]) for param in params]
        driver = SlabDriver(optimizer, init_state_fn, settings.config, ranks=ranks)
    count = itertools.count()
    driver.attach([[next(count) for _ in group["params"]] for group in optimizer.param_groups])
    return [driver]
