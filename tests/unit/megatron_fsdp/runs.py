"""Runs of ``tests.unit.storage.runs`` in models that Megatron-FSDP manages."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.utils import get_model_config

from megatron_eopt import get_megatron_optimizer
from megatron_eopt.testing.scene import forget_megatron
from tests.unit.fsdp2.models import config as emerging
from tests.unit.fsdp2.models import eager, shard, whole
from tests.unit.storage import runs
from tests.unit.storage.runs import (
    ZERO_EVERY,
    Result,
    Run,
    Slab,
    global_name,
    global_values,
    make_config,
    slab_of,
)


def wrap(model: torch.nn.Module, **flags: Any) -> FullyShardedDataParallel:
    config = get_model_config(model)
    fields = {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "gradient_reduce_div_fusion": False,
        "bucket_size": 5000,
    }
    ddp_config = DistributedDataParallelConfig(**(fields | flags))
    wrapped = FullyShardedDataParallel(config, ddp_config, model)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync
    return wrapped


def make_chunk(run: Run) -> Any:
    return runs.make_chunk(run, wrap)


def make_optimizer(run: Run, chunk: Any) -> Any:
    sharded = {"use_distributed_optimizer": True, **run.config}
    # the class that knows all optimizers, or megatron-core's
    known = "optimizer" in run.config
    plain = replace(run, config={"muon_tp_mode": "auto", **sharded})
    config = emerging(**sharded) if known else make_config(plain)
    optimizer = get_megatron_optimizer(config, [chunk])
    runs.set_rates(optimizer, config)
    return optimizer


def inject(run: Run, chunk: Any, step: int) -> None:
    """Set the gradients that a reduction would leave: none where a rank has nothing."""
    chunk.module._replace_param_with_distributed_if_needed()
    for name, param in chunk.named_parameters():
        original = param.orig_param
        slab = slab_of(name, original, run.model.get("gated", False))
        values = global_values(global_name(name, run.model), slab, original.shape, 1 + step)
        # zeros to be counted
        values.view(-1)[::ZERO_EVERY] = 0
        grad = shard(slab.of(values), param).to(param.dtype)
        param.grad = grad if grad.to_local().numel() else None


def weights(run: Run, chunk: Any) -> dict[str, tuple[Slab, torch.Tensor]]:
    """Return this rank's slabs of all weights; collective."""
    chunk.module._replace_param_with_distributed_if_needed()
    found = {}
    for name, param in chunk.named_parameters():
        slab = slab_of(name, param.orig_param, run.model.get("gated", False))
        full = whole(param)
        if slab.dim != -1:
            full = full.chunk(slab.parts, slab.dim)[slab.part].clone()
        found[global_name(name, run.model)] = slab, full
    return found


def stepped(
    run: Run, chunk: Any, optimizer: Any, first: int, end: int, inject: Any = inject
) -> list[Any]:
    """Do some steps and return what each returned."""
    returned = []
    for step in range(first, end):
        optimizer.zero_grad()
        inject(run, chunk, step)
        returned.append(optimizer.step())
    return returned


def train_in_ddp(run: Run) -> Result:
    """Do the same in one process in a model that Megatron's DDP wraps; return main weights."""
    chunk = runs.make_chunk(run)
    optimizer = make_optimizer(run, chunk)
    steps = stepped(run, chunk, optimizer, 0, run.steps, runs.inject)
    mains = {i.param: i.main for m in optimizer.chained_optimizers for i in m.shards}
    found = {
        global_name(name, run.model): (
            slab_of(name, param, run.model.get("gated", False)),
            mains[param].detach().view(param.shape).clone(),
        )
        for name, param in chunk.named_parameters()
    }
    return Result(found, steps)


def train(run: Run) -> Result:
    """Build, step, and return this rank's weights, and how much it has of each parameter."""
    chunk = make_chunk(run)
    optimizer = make_optimizer(run, chunk)
    steps = stepped(run, chunk, optimizer, 0, run.steps)
    result = weights(run, chunk)
    parts = {
        name: param.to_local().numel() / math.prod(param.shape)
        for name, param in chunk.named_parameters()
    }
    return Result(result, steps, parts)


@eager
def train_all(how: Callable[[Run], Result], runs: dict[str, Run]) -> dict[str, Result]:
    """Do several runs after one another."""
    results = {}
    for name, run in runs.items():
        results[name] = how(run)
        forget_megatron()
    return results
