"""The Triton kernel of :func:`megatron_eopt.layouts.redistribution.run_copies`, launched once.

It gets two tables. ``programs`` has for each program the index of its block and its part of that
block; it follows from sizes. ``table`` has for each block two addresses, three sizes, and two
strides each for source and sink.
"""

import math
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from megatron_eopt.base.kernel_tables import TYPES, programs_of, table_of

BLOCK = tl.constexpr(2048)
"""Elements that one program copies."""

_FIELDS = tl.constexpr(9)


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
    device = outs[0].device
    read, write = (TYPES[side[0].dtype] for side in (blocks, outs))
    for aligned, rows in parts.items():
        counts = tuple(-(-math.prod(row[2:5]) // BLOCK.value) for row in rows)
        if any(counts):
            _copy[(sum(counts),)](
                programs_of(device, counts).on_this_stream(),
                table_of(device, tuple(rows)).on_this_stream(),
                read,
                write,
                aligned,
                num_warps=8,
                enable_fp_fusion=False,
            )
