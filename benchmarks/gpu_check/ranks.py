"""Run functions on several ranks, on GPUs or the CPU.

With NCCL each rank has its own GPU. If there are more ranks than GPUs, they share GPUs over gloo.
"""

import os
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from torch import distributed

from benchmarks.gpu_check.context import OnRanks
from megatron_eopt.cpu import Device
from megatron_eopt.testing.pool import Pool
from megatron_eopt.testing.scene import connect, forget_everything

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
COUNTS = ("1", "8")
"""The values that trainers use: one can hold up kernels behind a stream that waits."""

_TIMEOUT_S = 86400.0
"""The time limit of a section ends it long before."""


def ranks_on(device: Device) -> OnRanks:
    """Return a function that runs functions on ranks; an error on one rank stops all.

    A single rank runs in this process, which saves the imports of a new one, unless
    ``CUDA_DEVICE_MAX_CONNECTIONS`` has changed since this call: CUDA reads it once in a process.
    """
    connections = os.environ.get(CONNECTIONS)

    def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        backend = "nccl" if world_size <= gpus else "gloo"
        job = (gpus, torch.get_num_threads(), function, args)
        if world_size > 1 or os.environ.get(CONNECTIONS) != connections:
            with closing(Pool(world_size, fresh=True)) as pool:
                return pool.run(_called, job, _TIMEOUT_S, cpu=not gpus, backend=backend)
        connect(0, 1, distributed.HashStore(), cpu=not gpus, backend=backend)
        try:
            return [_called(*job)]
        finally:
            forget_everything()
            # what comes next in this process asks how much memory is free
            torch.cuda.empty_cache()

    return on_ranks


def _called(gpus: int, threads: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(threads)
    if gpus:
        torch.cuda.set_device(distributed.get_rank() % gpus)
    return function(*args)
