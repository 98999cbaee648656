"""The state that every job finds, a fresh process group, and how nothing of a job is left."""

import gc
import logging
import os
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from megatron_eopt.cpu import disable, enable

# below the parent's time-out a rank would report gloo's own one, above it the parent speaks first
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)

_wrapped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models wrapped in megatron-core's DDP or FSDP that are still there."""


def watch_wrapped_models() -> None:
    """Note every model that is wrapped from now on, for :func:`forget_everything`."""

    def note(parent: torch.nn.Module, _name: str, _child: torch.nn.Module | None) -> None:
        if type(parent).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel"):
            _wrapped.add(parent)

    torch.nn.modules.module.register_module_module_registration_hook(note)


def connect(rank: int, world_size: int, store: Store, *, cpu: bool, backend: str) -> None:
    """Make this process a rank, with the CPU back end if asked."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    os.environ.update({**ranks, **sizes, "MASTER_ADDR": "127.0.0.1"})
    torch.manual_seed(0)
    if cpu:
        enable()
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=_COLLECTIVE_TIMEOUT
    )


def forget_everything() -> None:
    """Drop all global state and process groups, once all ranks have ended their job."""
    forget_megatron()
    forget_wrapped_models()
    # it gives out meshes of groups that are no more
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    disable()
    if dist.is_initialized():
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        # each waits 10 ms for its threads to end
        with ThreadPoolExecutor(len(groups)) as threads:
            list(threads.map(lambda place: groups.__setitem__(place, None), range(len(groups))))
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    logging.disable(logging.NOTSET)
    gc.collect()


def forget_wrapped_models() -> None:
    """Let go of what wrapped models hold: process groups, whose threads poll, among it.

    The garbage collector does not see that fragments hold, in C++, hooks that hold the model.
    """
    while _wrapped:
        vars(_wrapped.pop()).clear()


def forget_megatron() -> None:
    """Drop the global state of megatron-core and of the trainer; process groups stay."""
    if "megatron.core.parallel_state" not in sys.modules:
        return
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_logging

    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.unset_num_microbatches_calculator()
    destroy_rerun_state_machine()
    random._CUDA_RNG_STATE_TRACKER = None
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
    moe_logging.destroy_moe_metrics_tracker()
    training: Any = sys.modules.get("megatron.training.global_vars")
    if training is not None:
        training.destroy_global_vars()
