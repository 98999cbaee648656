"""The Triton kernel of :func:`megatron_eopt.layouts.redistribution.run_copies`, launched once.

It gets an int64 table: for each program the index of its block and its part of that block; then for
each block two addresses, three sizes, and two strides each for source and sink.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

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
    return tl.multiple_of(number, 16) if aligned else number


@triton.jit
def _copy(table: tl.tensor, read: tl.constexpr, write: tl.constexpr, aligned: tl.constexpr) -> None:
    """Copy a program's elements; the last dimension is dense on both sides."""
    programs = tl.num_programs(0)
    block = table + 2 * programs + tl.load(table + tl.program_id(0)) * _FIELDS
    first = tl.load(table + programs + tl.program_id(0)).to(tl.int32) * BLOCK
    places = first + tl.arange(0, BLOCK)
    width = _number(block, 4, aligned).to(tl.int32)
    height = tl.load(block + 3).to(tl.int32)
    mask = places < tl.load(block + 2).to(tl.int32) * height * width
    rows = places // width
    columns = places % width
    planes, rows = (rows // height).to(tl.int64), (rows % height).to(tl.int64)
    source = tl.load(block).to(tl.pointer_type(read))
    sink = tl.load(block + 1).to(tl.pointer_type(write))
    if aligned:
        source, sink = tl.multiple_of(source, 16), tl.multiple_of(sink, 16)
    source += planes * _number(block, 5, aligned) + rows * _number(block, 6, aligned)
    sink += planes * _number(block, 7, aligned) + rows * _number(block, 8, aligned)
    values = tl.load(source + columns, mask=mask).to(write)
    tl.store(sink + columns, values, mask=mask)


@lru_cache(maxsize=256)
def _table(device: torch.device, blocks: tuple[tuple[int, ...], ...]) -> tuple[Tensor, int, bool]:
    """Return the table on a device, the number of programs, and whether everything is aligned."""
    values = np.array(blocks, np.int64)
    counts = -(-values[:, 2:5].prod(1) // BLOCK.value)
    number = np.repeat(np.arange(len(values)), counts)
    part = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = torch.from_numpy(np.concatenate([number, part, values.ravel()]))
    if device.type == "cuda":
        table = table.pin_memory()
    is_aligned = not (values[:, (0, 1, 4, 5, 6, 7, 8)] % 16).any()
    return table.to(device, non_blocking=True), len(number), is_aligned


def launch(outs: Sequence[Tensor], blocks: Sequence[Tensor]) -> None:
    """Copy blocks to ``outs``: 1-D to 3-D, the last dimension dense, one dtype on each side."""
    rows = []
    for out, block in zip(outs, blocks, strict=True):
        ahead = 3 - block.dim()
        sizes = (*(1,) * ahead, *block.shape)
        strides = [((0,) * ahead + side.stride())[:2] for side in (block, out)]
        rows.append((block.data_ptr(), out.data_ptr(), *sizes, *strides[0], *strides[1]))
    table, programs, is_aligned = _table(outs[0].device, tuple(rows))
    if programs:
        types = _TYPES[blocks[0].dtype], _TYPES[outs[0].dtype]
        _copy[(programs,)](table, *types, is_aligned, num_warps=8)
