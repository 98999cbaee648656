"""Run functions on several ranks, on GPUs or the CPU.

With NCCL each rank has its own GPU. If there are more ranks than GPUs, they share GPUs over gloo.
"""

import gc
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu_check.context import OnRanks
from megatron_eopt import cpu
from megatron_eopt.cpu import Device
from tests.harness.scene import forget_megatron

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
COUNTS = ("1", "8")
"""The values that trainers use: one can hold up kernels behind a stream that waits."""


def ranks_on(device: Device) -> OnRanks:
    """Return a function that runs functions on ranks; an error on one rank stops all.

    A single rank runs in this process, which saves the imports of a new one, unless
    ``CUDA_DEVICE_MAX_CONNECTIONS`` has changed since this call: CUDA reads it once in a process.
    """
    connections = os.environ.get(CONNECTIONS)

    def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        with tempfile.TemporaryDirectory() as name:
            job = (device, world_size, Path(name), function, args)
            if world_size == 1 and os.environ.get(CONNECTIONS) == connections:
                _be_rank(0, *job)
            else:
                spawn(_be_rank, job, nprocs=world_size)  # type: ignore[no-untyped-call]
            return [pickle.loads(_result(Path(name), i).read_bytes()) for i in range(world_size)]

    return on_ranks


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _be_rank(
    rank: int,
    device: Device,
    world_size: int,
    folder: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    torch.manual_seed(0)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if gpus:
        torch.cuda.set_device(rank % gpus)
    else:
        cpu.enable()
    dist.init_process_group(
        "nccl" if world_size <= gpus else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
    )
    try:
        _result(folder, rank).write_bytes(pickle.dumps(function(*args)))
    finally:
        forget_megatron()
        cpu.disable()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        # what comes next in this process asks how much memory is free
        torch.cuda.empty_cache()
