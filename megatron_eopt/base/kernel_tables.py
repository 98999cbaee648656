"""What kernels over many tensors are launched with: one program for each block of each tensor."""

from functools import lru_cache

import numpy as np
import torch
import triton.language as tl

from megatron_eopt.base.gpu import Table

TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
"""Triton's number types by torch's."""


@lru_cache(maxsize=256)
def programs_of(device: torch.device, blocks: tuple[int, ...]) -> Table:
    """Return the tensor of each program, then its block in the tensor, int32 ``(2, programs)``.

    ``blocks`` are how many each tensor has.
    """
    tensor = np.repeat(np.arange(len(blocks), dtype=np.int32), blocks)
    firsts = np.cumsum(blocks, dtype=np.int64) - blocks
    block = np.arange(len(tensor)) - np.repeat(firsts, blocks)
    return Table(np.stack([tensor, block.astype(np.int32)]), device)


# Addresses mostly repeat from step to step, because torch's allocator hands out the same memory.
# Then no table is built or uploaded.
@lru_cache(maxsize=2048)
def table_of(device: torch.device, rows: tuple[int | tuple[int, ...], ...]) -> Table:
    """Return sizes, addresses and strides of tensors, int64."""
    return Table(np.array(rows, np.int64), device)
