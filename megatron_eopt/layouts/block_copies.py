"""The Triton kernel of :func:`megatron_eopt.layouts.redistribution.run_copies`, launched once.

It gets two tables. ``programs`` has for each program the index of its block and its part of that
block; it follows from sizes. ``table`` has for each block two addresses, three sizes, and two
strides each for source and sink.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_eopt.base.gpu import Table

BLOCK = tl.constexpr(2048)
"""Elements that one program copies."""

_FIELDS = tl.constexpr(9)
_TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _number(table: tl.tensor, place: tl.tensor, aligned: tl.constexpr) -> tl.tensor:
    """Load a number of the table; multiples of 16 allow wide loads of elements."""
    number = tl.load(table + place)
    # Triton finds out divisibility for arguments only, not for numbers that a kernel loads
    return tl.multiple_of(number, 16) if aligned else number


@triton.jit
def _copy(
    programs: tl.tensor,
    table: tl.tensor,
    read: tl.constexpr,
    write: tl.constexpr,
    aligned: tl.constexpr,
) -> None:
    """Copy a program's elements; the last dimension is dense on both sides."""
    block = table + tl.load(programs + tl.program_id(0)) * _FIELDS
    first = tl.load(programs + tl.num_programs(0) + tl.program_id(0)) * BLOCK
    places = first + tl.arange(0, BLOCK)
    # divisions of 64-bit numbers are slow; `run_copies` sends no block here with more elements than
    # 32 bits can index
    width = _number(block, 4, aligned).to(tl.int32)
    height = tl.load(block + 3).to(tl.int32)
    mask = places < tl.load(block + 2).to(tl.int32) * height * width
    rows = places // width
    columns = places % width
    # an index times a stride may exceed 32 bits, since a block's rows can be far apart
    planes, rows = (rows // height).to(tl.int64), (rows % height).to(tl.int64)
    source = tl.load(block).to(tl.pointer_type(read))
    sink = tl.load(block + 1).to(tl.pointer_type(write))
    if aligned:
        source, sink = tl.multiple_of(source, 16), tl.multiple_of(sink, 16)
    source += planes * _number(block, 5, aligned) + rows * _number(block, 6, aligned)
    sink += planes * _number(block, 7, aligned) + rows * _number(block, 8, aligned)
    values = tl.load(source + columns, mask=mask).to(write)
    tl.store(sink + columns, values, mask=mask)


@lru_cache(maxsize=128)
def _programs(device: torch.device, sizes: tuple[tuple[int, ...], ...]) -> tuple[Table, int]:
    """Return the table of programs and how many there are, given the size of each block."""
    counts = -(-np.array(sizes, np.int64).prod(1) // BLOCK.value)
    number = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    part = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Table(np.stack([number, part.astype(np.int32)]), device), len(number)


# Addresses mostly repeat from step to step, because torch's allocator hands out the same memory.
# Then no table is built or uploaded.
@lru_cache(maxsize=1024)
def _table(device: torch.device, blocks: tuple[tuple[int, ...], ...]) -> Table:
    return Table(np.array(blocks, np.int64), device)


def launch(outs: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
    """Copy blocks to ``outs``: 1-D to 3-D, the last dimension dense, one dtype on each side.

    Blocks that are not aligned get a launch of their own, since they need narrow loads.
    """
    parts: dict[bool, list[tuple[int, ...]]] = {}
    for out, block in zip(outs, blocks, strict=True):
        # the kernel knows 3-D blocks only; leading dimensions of size 1 change nothing
        ahead = 3 - block.dim()
        sizes = (*(1,) * ahead, *block.shape)
        # without the last stride, which is 1
        source, sink = (((0,) * ahead + side.stride())[:2] for side in (block, out))
        row = (block.data_ptr(), out.data_ptr(), *sizes, *source, *sink)
        aligned = not any(number % 16 for number in (*row[:2], *row[4:]))
        parts.setdefault(aligned, []).append(row)
    device, types = outs[0].device, (_TYPES[blocks[0].dtype], _TYPES[outs[0].dtype])
    for aligned, rows in parts.items():
        programs, count = _programs(device, tuple(row[2:5] for row in rows))
        if count:
            tables = (programs.on_this_stream(), _table(device, tuple(rows)).on_this_stream())
            _copy[(count,)](*tables, *types, aligned, num_warps=8, enable_fp_fusion=False)
