"""One direction of one wave on one rank: split sizes and copies, computed from two layouts.

A rank that already holds all elements of its piece of the sink layout copies them locally. Every
other piece comes from the sources of its elements. So only one replica sends its direction, every
replica receives the update, and no collective is called if nothing has to travel.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_eopt.layouts.boxes import OFFSET, STRIDE, TENSOR, Boxes, Mask, matching


class Copy(NamedTuple):
    """A strided copy, with the same sizes on both sides."""

    source: int  # index of the flat tensor that is read
    sink: int  # index of the flat tensor that is written
    size: tuple[int, ...]  # sizes of the block, one to three dimensions
    read: tuple[int, ...]  # strides, then the offset, in the tensor that is read
    write: tuple[int, ...]  # strides, then the offset, in the tensor that is written


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank does in one direction of one wave."""

    send_sizes: tuple[int, ...]  # elements for each rank, in the order of the send buffer
    recv_sizes: tuple[int, ...]  # elements from each rank
    pack: list[Copy]  # copies from tensors to the send buffer
    unpack: list[Copy]  # copies from the receive buffer to tensors
    keep: list[Copy]  # copies between tensors on this rank
    collective: bool  # whether any rank of the group sends anything, so that all take part


def build_exchange(source: Boxes, sink: Boxes, rank: int, world_size: int) -> Exchange:
    """Return what ``rank`` does to move elements from the source boxes to the sink boxes.

    Boxes have the same order on all ranks, so sender and receiver agree on the order of elements.
    The time is linear in the number of boxes that the rank touches.
    """
    # Computed from the boxes of all ranks: a sender must know which receivers help themselves.
    wants = ~_self_served(source, sink, world_size)
    sends = source.source == 1
    here, there = source.rank == rank, sink.rank == rank
    packed, sent = _meet(source.take(sends & here), sink.take(wants & ~there))
    arriving, unpacked = _meet(source.take(sends & ~here), sink.take(wants & there))
    # `all_to_all_single` splits the send buffer by receiver and the receive buffer by sender. The
    # stable sort keeps the boxes' order for each pair of ranks, which both ends know.
    to, from_ = sent.rank.argsort(kind="stable"), arriving.rank.argsort(kind="stable")
    packed, unpacked = packed.take(to), unpacked.take(from_)
    # a piece that its rank copies locally may come from a replica that is not the source
    local_pairs = [
        _meet(source.take(here), sink.take(there & ~wants)),
        _meet(source.take(here & sends), sink.take(there & wants)),
    ]
    return Exchange(
        send_sizes=tuple(sent.held(world_size).tolist()),
        recv_sizes=tuple(arriving.held(world_size).tolist()),
        pack=_make_copies(packed, _on_wire(packed)),
        unpack=_make_copies(_on_wire(unpacked), unpacked),
        keep=[copy for read, write in local_pairs for copy in _make_copies(read, write)],
        # also true on a rank that sends nothing: either all ranks of the group call it, or none
        collective=bool(wants.any()),
    )


def _self_served(source: Boxes, sink: Boxes, world_size: int) -> Mask:
    """Return which sink boxes are entirely within the source boxes of the same rank."""
    i, j = matching(sink.matrix * world_size + sink.rank, source.matrix * world_size + source.rank)
    # boxes of one rank do not overlap, so the areas of intersections add up
    covered = np.zeros(len(sink), np.int64)
    np.add.at(covered, i, sink.take(i).clip(source.take(j)).area)
    return np.equal(covered, sink.area)


def _meet(a: Boxes, b: Boxes) -> tuple[Boxes, Boxes]:
    """Return intersections of boxes of the same matrix, as parts of both, in the order of ``a``."""
    i, j = matching(a.matrix, b.matrix)
    a, b = a.take(i), b.take(j)
    a, b = a.clip(b), b.clip(a)
    shared = a.area > 0
    return a.take(shared), b.take(shared)


def _on_wire(boxes: Boxes) -> Boxes:
    """Return the same boxes packed one after another in a flat buffer."""
    flat = boxes.replace(OFFSET, np.cumsum(boxes.area) - boxes.area)
    return flat.replace(STRIDE, boxes.width).replace(TENSOR, 0)


def _make_copies(read: Boxes, write: Boxes) -> list[Copy]:
    """Merge copies of boxes into as few strided copies as possible, in the order of the buffer.

    Consecutive rows on both sides become one run. Equal blocks at equal distances (the groups of a
    fused QKV weight, interleaved gate and up rows) become one 3-D block.
    """
    if not len(read):
        return []
    # rows without gaps on both sides are one long row: a block of height 1
    flat = (read.height == 1) | ((read.stride == read.width) & (write.stride == write.width))
    size = np.where(flat, [np.ones_like(read.height), read.area], [read.height, read.width])
    strides = np.where(flat, 0, [read.stride, write.stride])
    tensors = np.stack([read.tensor, write.tensor])
    places = np.stack([read.offset, write.offset])
    # a row that continues the one before it on both sides is merged with it
    joined = (size[0, 1:] == 1) & (size[0, :-1] == 1)
    joined &= (tensors[:, 1:] == tensors[:, :-1]).all(0)
    joined &= (places[:, 1:] == places[:, :-1] + size[1, :-1]).all(0)
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    # a merged row is as long as its members together; blocks of several rows have only themselves
    size[1, first] = np.add.reduceat(size[1], first)
    blocks = np.concatenate([tensors, size, strides])[:, first]
    return _repeat_blocks(blocks.T.tolist(), places[:, first].T.tolist())


def _repeat_blocks(blocks: list[list[int]], places: list[list[int]]) -> list[Copy]:
    """Merge equal blocks at equal, positive distances into one copy.

    A block is ``[source, sink, height, width, read stride, write stride]``, a place its offsets.
    """
    # the distance to the next block if that is its repetition; no distance is negative, because
    # `as_strided` takes no such strides
    steps = [
        step if a == b and min(step := (q[0] - p[0], q[1] - p[1])) >= 0 else None
        for (a, b), (p, q) in zip(pairwise(blocks), pairwise(places), strict=True)
    ]
    copies = []
    first = 0
    while first < len(blocks):
        last = first
        while last < len(steps) and steps[last] and steps[last] == steps[first]:
            last += 1
        source, sink, height, width, read_stride, write_stride = blocks[first]
        read_at, write_at = places[first]
        size: tuple[int, ...] = (width,)
        read: tuple[int, ...] = (1, read_at)
        write: tuple[int, ...] = (1, write_at)
        if height > 1:
            size, read, write = (height, *size), (read_stride, *read), (write_stride, *write)
        if last > first:
            read_by, write_by = places[first + 1][0] - read_at, places[first + 1][1] - write_at
            size, read, write = (last - first + 1, *size), (read_by, *read), (write_by, *write)
        copies.append(Copy(source, sink, size, read, write))
        first = last + 1
    return copies
