"""Puts together a piece of state from the boxes that a checkpoint has.

Note [Sources]
    What a load asks for is a box of a tensor: of a parameter's state, or of one matrix's. What a
    checkpoint has of it are sources: the whole tensor, one for each layer of a stack, padding that
    repeats the last row, ranges of flat buckets, the matrices of a fused weight. All are boxes, so
    one function reads any of them into any layout.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from megatron_eopt.layouts.boxes import Box


@dataclass(frozen=True)
class Source:
    """A box of what is asked for that a checkpoint has, and where.

    The tensor that is asked for and the checkpoint's may have further leading dimensions of which
    the box has one index.
    """

    key: str  # of the checkpoint's tensor
    global_shape: tuple[int, ...]  # that tensor's
    box: Box  # in the tensor that is asked for
    global_offset: tuple[int, ...]  # of the box in the checkpoint's tensor
    strides: tuple[int, ...] | None = None  # of the box in a flat tensor, if it is in one
    repeats: bool = False  # whether all rows of the box are one row of the tensor

    def turned(self, key: str, shape: tuple[int, ...]) -> "Source":
        """Return the source of the checkpoint's tensor in what is asked for, if that is saved."""
        size = (1,) * (len(self.global_shape) - len(self.box.shape)) + self.box.shape
        return Source(key, shape, Box(self.global_offset, size), self.box.offset)

    def part(self, part: Box) -> tuple[Box, tuple[int, ...]]:
        """Return what to read of the tensor for a part of the box, and the strides in it."""
        moved = tuple(map(operator.sub, part.offset, self.box.offset))
        if self.strides is not None:
            first = self.global_offset[0] + math.sumprod(moved, self.strides)
            length = 1 + math.sumprod((n - 1 for n in part.shape), self.strides)
            return Box((int(first),), (int(length),)), self.strides
        shape = part.shape
        if self.repeats:
            shape, moved = (1, *shape[1:]), (0, *moved[1:])
        strides = [math.prod(shape[n + 1 :]) for n in range(len(shape))]
        strides[0] *= not self.repeats
        # dimensions are aligned at the last one
        dims = min(len(self.global_shape), len(shape))
        lead = len(self.global_shape) - dims
        offset = (
            *self.global_offset[:lead],
            *map(operator.add, self.global_offset[lead:], moved[len(moved) - dims :]),
        )
        return Box(offset, ((1,) * lead + shape)[-len(self.global_shape) :]), tuple(strides)


def tensor_sources(key: str, shape: tuple[int, ...], piece: ShardedTensor) -> list[Source]:
    """Return the sources in a tensor of the piece's shape, or with other padding of a vocabulary.

    New rows are copies of the last one, which usually is padding.
    """
    wanted, zeros = tuple(piece.global_shape), (0,) * len(shape)
    # megatron-core allows this for tensors with a row for each token only
    if shape != wanted and not (piece.allow_shape_mismatch and shape[1:] == wanted[1:]):
        return []
    sources = [Source(key, shape, Box(zeros, shape), zeros)]
    if wanted > shape:
        rows = Box((shape[0], *zeros[1:]), (wanted[0] - shape[0], *shape[1:]))
        sources.append(Source(key, shape, rows, (shape[0] - 1, *zeros[1:]), repeats=True))
    return sources


def assemble(
    piece: ShardedTensor, sources: Sequence[Source]
) -> ShardedTensor | ShardedTensorFactory | None:
    """Return what reads a piece from a checkpoint; None if sources lack a part of it.

    What is read needs no other memory than the piece's where the elements are in the same order.
    """
    wanted = Box(tuple(piece.global_offset), tuple(piece.local_shape))
    parts = [(source, part) for source in sources if (part := wanted.clip(source.box))]
    if sum(math.prod(part.shape) for _, part in parts) != math.prod(wanted.shape):
        return None
    reads: dict[str, ShardedTensor] = {}
    # slices of the piece, and shape and strides in what was read
    targets: dict[str, tuple[tuple[slice, ...], tuple[int, ...], tuple[int, ...]]] = {}
    for number, (source, part) in enumerate(parts):
        box, strides = source.part(part)
        read = replace(
            piece,
            key=source.key,
            data=None,
            local_shape=box.shape,
            global_shape=source.global_shape,
            global_offset=box.offset,
            axis_fragmentations=None,
            prepend_axis_num=0,
            allow_shape_mismatch=False,
        )
        starts = map(operator.sub, part.offset, wanted.offset)
        slices = tuple(slice(at, at + n) for at, n in zip(starts, part.shape, strict=True))
        if len(parts) == 1 and box.shape == part.shape and source.strides is None:
            return replace(read, data=piece.data)
        if len(parts) == 1 and _is_in_order(piece.data, part.shape, strides):
            # the same memory, in the dimensions of the checkpoint's tensor
            return replace(read, data=piece.data.view(box.shape))
        reads[str(number)], targets[str(number)] = read, (slices, part.shape, strides)

    target: Tensor = piece.data.detach()

    def build(*_: Any) -> dict[str, ShardedTensor]:
        for read in reads.values():
            read.data = target.new_empty(read.local_shape)
        return dict(reads)

    def merge(loaded: Mapping[str, Tensor]) -> Tensor:
        for number, (slices, shape, strides) in targets.items():
            value = loaded[number]
            target[slices].copy_(value.as_strided(shape, strides, value.storage_offset()))
        return target

    return ShardedTensorFactory(parts[0][0].key, piece.data, build, merge, piece.replica_id)


def _is_in_order(data: Tensor, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a contiguous piece has its elements one after another, as they are saved."""
    usual = (math.prod(shape[n + 1 :]) for n in range(len(shape)))
    sizes = zip(shape, usual, strides, strict=True)
    return data.is_contiguous() and all(stride == saved for n, stride, saved in sizes if n > 1)
