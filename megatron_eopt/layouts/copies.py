"""Which strided blocks are copied between storage tensors, wire and compute buffers."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron_eopt.layouts.boxes import Boxes


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy, the same sizes on both sides."""

    source: int  # index of the flat tensor that is read
    sink: int  # index of the flat tensor that is written
    size: tuple[int, ...]  # sizes of the block, one to three dimensions
    read: tuple[int, ...]  # strides and, last, the offset in the tensor that is read
    write: tuple[int, ...]  # strides and, last, the offset in the tensor that is written


def make_copies(read: Boxes, write: Boxes) -> list[Copy]:
    """Merge copies of boxes into as few strided ones as possible, in the order of the wire.

    Rows that follow one another on both sides become one run; equal blocks at equal distances
    (the groups of a fused QKV weight, interleaved gate and up rows) become one block of three
    dimensions, whatever their number.
    """
    if not len(read):
        return []
    flat = (read.height == 1) | ((read.stride == read.width) & (write.stride == write.width))
    size = np.where(flat, [np.ones_like(read.height), read.area], [read.height, read.width])
    strides = np.where(flat, 0, [read.stride, write.stride])
    tensors = np.stack([read.tensor, write.tensor])
    places = np.stack([read.offset, write.offset])
    joined = (size[0, 1:] == 1) & (size[0, :-1] == 1)
    joined &= (tensors[:, 1:] == tensors[:, :-1]).all(0)
    joined &= (places[:, 1:] == places[:, :-1] + size[1, :-1]).all(0)
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    size[1, first] = np.add.reduceat(size[1], first)
    blocks = np.concatenate([tensors, size, strides])[:, first]
    return _repeat_blocks(blocks.T.tolist(), places[:, first].T.tolist())


def _repeat_blocks(blocks: list[list[int]], places: list[list[int]]) -> list[Copy]:
    """Turn equal blocks at equal, positive distances into one copy.

    A block is its two tensors, height and width, and two strides from row to row; a place is where
    it begins in both tensors.
    """
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(places)]
    again = [
        min(step) >= 0 and a == b for step, (a, b) in zip(steps, pairwise(blocks), strict=True)
    ]
    copies = []
    first = 0
    while first < len(blocks):
        last = first
        while last < len(steps) and again[last] and steps[last] == steps[first]:
            last += 1
        source, sink, height, width, read_stride, write_stride = blocks[first]
        dims = [(width, 1, 1)]
        if height > 1:
            dims.insert(0, (height, read_stride, write_stride))
        if last > first:
            dims.insert(0, (last - first + 1, *steps[first]))
        size, read, write = zip(*dims, strict=True)
        read_at, write_at = places[first]
        copies.append(Copy(source, sink, size, (*read, read_at), (*write, write_at)))
        first = last + 1
    return copies
