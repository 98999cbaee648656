"""Which strided blocks are copied between storage tensors, wire and compute buffers."""

from dataclasses import dataclass

import numpy as np

from megatron_eopt.layouts.boxes import Int64Array


@dataclass(frozen=True, slots=True)
class End:
    """One side of boxes that are copied; entry ``i`` belongs to box ``i``."""

    tensor: Int64Array  # index of the flat tensor
    offset: Int64Array  # place of the first element
    stride: Int64Array  # elements from one row to the next


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy, the same sizes on both sides."""

    source: int  # index of the flat tensor that is read
    sink: int  # index of the flat tensor that is written
    size: tuple[int, ...]  # sizes of the block, one to three dimensions
    read: tuple[int, ...]  # strides and, last, the offset in the tensor that is read
    write: tuple[int, ...]  # strides and, last, the offset in the tensor that is written


def make_copies(height: Int64Array, width: Int64Array, read: End, write: End) -> list[Copy]:
    """Merge box copies into as few strided ones as possible, in the order of the wire.

    Rows that follow one another on both sides become one run; equal blocks at equal distances
    (the groups of a fused QKV weight, interleaved gate and up rows) become one block of three
    dimensions, whatever their number.
    """
    flat = (height == 1) | ((read.stride == width) & (write.stride == width))
    columns = [
        read.tensor,
        write.tensor,
        np.where(flat, 1, height),
        np.where(flat, height * width, width),
        np.where(flat, 0, read.stride),
        np.where(flat, 0, write.stride),
        read.offset,
        write.offset,
    ]
    boxes = np.stack(columns, axis=1)
    return _repeat_blocks(_join_runs([tuple(row) for row in boxes.tolist()]))


type _Block = tuple[int, ...]


def _join_runs(blocks: list[_Block]) -> list[_Block]:
    """Join runs that follow one another on both sides."""
    out: list[_Block] = []
    for block in blocks:
        if out and block[2] == out[-1][2] == 1 and block[:2] == out[-1][:2]:
            last = out[-1]
            if (block[6], block[7]) == (last[6] + last[3], last[7] + last[3]):
                out[-1] = (*last[:3], last[3] + block[3], *last[4:])
                continue
        out.append(block)
    return out


def _repeat_blocks(blocks: list[_Block]) -> list[Copy]:
    """Turn equal blocks at equal, positive distances into one copy."""
    copies = []
    first = 0
    while first < len(blocks):
        head = blocks[first]
        count, jump = 1, (0, 0)
        while first + count < len(blocks):
            block, last = blocks[first + count], blocks[first + count - 1]
            step = (block[6] - last[6], block[7] - last[7])
            if block[:6] != head[:6] or min(step) < 0 or (count > 1 and step != jump):
                break
            count, jump = count + 1, step
        copies.append(_copy(head, count, jump))
        first += count
    return copies


def _copy(block: _Block, count: int, jump: tuple[int, int]) -> Copy:
    source, sink, height, width, read_stride, write_stride, read, write = block
    dims = [
        (count, jump[0], jump[1]),
        (height, read_stride, write_stride),
        (width, 1, 1),
    ]
    kept = [dim for dim in dims[:2] if dim[0] > 1] + dims[2:]
    return Copy(
        source,
        sink,
        tuple(dim[0] for dim in kept),
        (*(dim[1] for dim in kept), read),
        (*(dim[2] for dim in kept), write),
    )
