"""Moves: which strided blocks are copied between storage tensors, wire and compute buffers."""

from dataclasses import dataclass, field

import numpy as np

from megatron_eopt.layouts.boxes import Int64Array

__all__ = ["End", "Move", "Moves", "make_moves"]


@dataclass(frozen=True, slots=True)
class End:
    """One side of boxes that are copied; entry ``i`` belongs to box ``i``.

    Attributes:
        tensor: Index of the flat tensor.
        offset: Place of the first element.
        stride: Elements from one row to the next.
    """

    tensor: Int64Array
    offset: Int64Array
    stride: Int64Array


@dataclass(frozen=True, slots=True)
class Move:
    """One strided copy, the same sizes on both sides.

    Attributes:
        source: Index of the flat tensor that is read.
        sink: Index of the flat tensor that is written.
        size: Sizes of the block, one to three dimensions.
        read: Strides and, last, the offset in the tensor that is read.
        write: Strides and, last, the offset in the tensor that is written.
    """

    source: int
    sink: int
    size: tuple[int, ...]
    read: tuple[int, ...]
    write: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies in the order of the wire.

    Attributes:
        moves: The copies, as few as regular runs allow.
        elements: What they copy in all.
    """

    moves: tuple[Move, ...] = ()
    elements: int = field(default=0)


def make_moves(height: Int64Array, width: Int64Array, read: End, write: End) -> Moves:
    """Merge box copies into as few strided ones as possible.

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
    joined = _join_runs([tuple(row) for row in boxes.tolist()])
    return Moves(tuple(_repeat_blocks(joined)), int((height * width).sum()))


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


def _repeat_blocks(blocks: list[_Block]) -> list[Move]:
    """Turn equal blocks at equal, positive distances into one move."""
    moves = []
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
        moves.append(_move(head, count, jump))
        first += count
    return moves


def _move(block: _Block, count: int, jump: tuple[int, int]) -> Move:
    source, sink, height, width, read_stride, write_stride, read, write = block
    dims = [
        (count, jump[0], jump[1]),
        (height, read_stride, write_stride),
        (width, 1, 1),
    ]
    kept = [dim for dim in dims[:2] if dim[0] > 1] + dims[2:]
    return Move(
        source,
        sink,
        tuple(dim[0] for dim in kept),
        (*(dim[1] for dim in kept), read),
        (*(dim[2] for dim in kept), write),
    )
