"""Puts together a piece of state from the boxes that a checkpoint has.

Note [Sources]
    What a load asks for is a box of a tensor: of a parameter's state, or of one matrix's. What a
    checkpoint has of it are sources: the whole tensor, one for each layer of a stack, padding that
    repeats the last row, ranges of flat buckets, the matrices of a fused weight. All are boxes, so
    one function reads any of them into any layout.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from torch import Tensor

from megatron_eopt.checkpoint.catalogue import Catalogue
from megatron_eopt.checkpoint.keys import matrix_state_key, state_key, unstacked_key
from megatron_eopt.layouts.boxes import Box

type Piece = ShardedTensor | ShardedObject | ShardedTensorFactory
"""A box of a checkpoint's tensor, or an object, with the data to write from or to read into."""

type Pieces = tuple[Piece, ...]


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
        if self.repeats:
            strides[0] = 0
        # dimensions are aligned at the last one
        dims = min(len(self.global_shape), len(shape))
        lead = len(self.global_shape) - dims
        offset = (
            *self.global_offset[:lead],
            *map(operator.add, self.global_offset[lead:], moved[len(moved) - dims :]),
        )
        return Box(offset, ((1,) * lead + shape)[-len(self.global_shape) :]), tuple(strides)


class MatrixSource(NamedTuple):
    """A box of a logical matrix, and where it is in the parameter's tensor."""

    name: str  # the parameter's, unique in the model
    matrix: tuple[int, int]  # index of the matrix, and the number of the parameter's matrices
    shape: tuple[int, int]  # of the matrix
    source: Source  # of the matrix, in the tensor of the parameter's key

    def key(self, kind: str) -> str:
        """Return the key of a kind of the matrix's state."""
        return matrix_state_key(kind, self.name, self.matrix)


type Boxes = Mapping[str, Sequence[Source]]
"""By parameter: its boxes, whose keys and shapes are of a bucket, without a kind of state."""


def key_of(piece: Piece) -> str:
    """Return the checkpoint key of a piece."""
    return str(piece.key if isinstance(piece, ShardedTensor) else piece.unique_key)


def find(
    catalogue: Catalogue,
    boxes: Boxes,
    piece: Piece,
    kind: str,
    saved_kind: str,
    stacked: int,
    matrices: Callable[[], Sequence[MatrixSource]],
) -> Piece | None:
    """Return what reads a piece from a checkpoint's ``saved_kind``; None without all of it.

    Args:
        catalogue: What the checkpoint has.
        boxes: Where parameters are in its buckets.
        piece: The piece, whose data is written to.
        kind: Its kind of state.
        saved_kind: The kind to read: main weights have two names.
        stacked: The number of its leading dimensions that index layers or experts.
        matrices: Returns the parameter's logical matrices, by whose keys state may be saved.
    """
    if not isinstance(piece, ShardedTensor):
        full = catalogue.full_key(key_of(piece)) if saved_kind == kind else None
        # with the index in a chain, if the checkpoint's keys have one
        return full and replace(piece, key=full.removesuffix(key_of(piece)) + piece.key)
    forms = _forms(catalogue, boxes, piece, kind, saved_kind, stacked, matrices)
    return next((read for sources in forms if (read := assemble(piece, sources))), None)


def _forms(
    catalogue: Catalogue,
    boxes: Boxes,
    piece: ShardedTensor,
    kind: str,
    saved_kind: str,
    stacked: int,
    matrices: Callable[[], Sequence[MatrixSource]],
) -> Iterator[list[Source]]:
    """Yield the sources of the forms in which a checkpoint may have a piece's tensor."""
    shapes, present = catalogue.shapes, catalogue.tensor_keys

    def of_tensor(key: str) -> list[Source]:
        keys = present(key)
        return [s for full in keys for s in tensor_sources(full, shapes[full] or (), piece)]

    parameter = piece.key.removeprefix(state_key(kind, ""))
    if parameter == piece.key:
        # state of one matrix, under its own key, or as a part of the parameter's
        yield of_tensor(piece.key)
        yield [
            replace(part.source, key=key)
            for part in matrices()
            if part.key(kind) == piece.key
            for key in present(state_key(kind, part.source.key))
            if shapes[key] == part.source.global_shape
        ]
        return
    saved = state_key(saved_kind, parameter)
    yield of_tensor(saved)
    if stacked:
        yield list(_of_layers(catalogue, saved, piece, stacked))
    yield [
        replace(source, key=key, global_shape=size)
        for source in boxes.get(parameter, ())
        if (size := shapes.get(key := f"{source.key}.{saved_kind}"))
    ]
    yield [
        part.source.turned(key, part.shape)
        for part in matrices()
        if part.source.key == parameter
        for key in present(part.key(saved_kind))
        if shapes[key] == part.shape
    ]


def _of_layers(
    catalogue: Catalogue, key: str, piece: ShardedTensor, stacked: int
) -> Iterator[Source]:
    """Yield the tensors of the layers, or experts, that a piece of a stack has."""
    first, sizes = piece.global_offset, piece.local_shape
    ranges = (range(at, at + n) for at, n in zip(first[:stacked], sizes, strict=False))
    shape, ones = tuple(piece.global_shape[stacked:]), (1,) * stacked
    zeros = (0,) * len(shape)
    for index in itertools.product(*ranges):
        box = Box((*index, *zeros), (*ones, *shape))
        for full in catalogue.tensor_keys(unstacked_key(key, index)):
            if catalogue.shapes[full] == (*ones, *shape):
                yield Source(full, (*ones, *shape), box, (0,) * len(first))


def unstacked(pieces: Pieces, stacked: int) -> Pieces:
    """Return pieces of stacked tensors as tensors per layer or expert; see Note [Keys].

    ``stacked`` is the number of leading dimensions that index layers or experts.
    """
    ones, zeros = (1,) * stacked, (0,) * stacked
    return tuple(
        replace(
            piece,
            key=unstacked_key(piece.key, piece.global_offset[:stacked]),
            global_shape=ones + tuple(piece.global_shape[stacked:]),
            global_offset=zeros + tuple(piece.global_offset[stacked:]),
        )
        for piece in pieces
    )


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
