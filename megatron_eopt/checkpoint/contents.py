"""Finds what a parameter asks for among what a checkpoint has."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

from megatron_eopt.base.names import MAINS, MOMENTUM, STEP
from megatron_eopt.checkpoint.catalogue import Catalogue
from megatron_eopt.checkpoint.continuation import SavedState
from megatron_eopt.checkpoint.keys import state_key, unstacked_key
from megatron_eopt.checkpoint.parameter_space import MatrixPart, ParameterSpace
from megatron_eopt.checkpoint.saved_groups import SavedGroups
from megatron_eopt.checkpoint.sources import Source, assemble, tensor_sources
from megatron_eopt.layouts.boxes import Box

type Piece = ShardedTensor | ShardedObject | ShardedTensorFactory
"""A box of a checkpoint's tensor, or an object, with the data to write from or to read into."""

type Pieces = tuple[Piece, ...]


def key_of(piece: Piece) -> str:
    """Return the checkpoint key of a piece."""
    return str(piece.key if isinstance(piece, ShardedTensor) else piece.unique_key)


class Contents:
    """The optimizer state of a checkpoint, as one of the optimizers of ``ours`` asks for it."""

    def __init__(self, catalogue: Catalogue, ours: Collection[str] = ()) -> None:
        self.catalogue = catalogue
        # a rank's file has no more than the rank's own boxes
        self._reads_boxes = catalogue.form != "torch"
        self._boxes = catalogue.bucket_boxes
        self._groups = SavedGroups(catalogue.groups, ours)
        # full key by key without the index in a chain: two optimizers of a chain have no parameter
        # in common, so nothing is lost
        self._keys = {key.removeprefix(value.chain): key for key, value in catalogue.values.items()}

    def state_of(self, space: ParameterSpace, reader: str) -> SavedState:
        """Return what the checkpoint has of a parameter, for the optimizer that reads it."""
        state, in_buckets = self.catalogue.state, self.catalogue.in_buckets
        # a parameter that is saved under several keys has a kind of state only if all of them have
        # it
        stacks = (
            {*state.get(stack, ()), *state.get(unstacked_key(stack, space.stack_index), ())}
            for stack in space.keys
        )
        # state of matrices is under the parameter's own name only
        kinds = set.intersection(*stacks) | {*state.get(space.name, ())}
        kinds -= MAINS | {STEP}
        boxes = (source.box for key in space.keys for source in self._boxes.get(key, ()))
        if kinds or all(box.offset[: space.prepended] != space.stack_index for box in boxes):
            names = space.name, space.key
            return self._groups.state_of(names, kinds, reader, is_matrix=space.is_matrix)
        # megatron-core saves only Adam and SGD in this form
        optimizer = "sgd" if MOMENTUM in in_buckets else "adam"
        return SavedState(frozenset(in_buckets - MAINS - {STEP}), (optimizer,))

    def shape_of(self, piece: Piece) -> tuple[int, ...] | None:
        """Return the shape of the tensor that a piece is of; None if it is not there."""
        return self.catalogue.shapes.get(self._keys.get(key_of(piece), ""))

    def find(
        self, piece: Piece, kind: str, saved_kind: str, stacked: int, matrices: Sequence[MatrixPart]
    ) -> Piece | None:
        """Return what reads a piece from the checkpoint's ``saved_kind``; None without all of it.

        Args:
            piece: The piece, whose data is written to.
            kind: Its kind of state.
            saved_kind: The kind of state to read.
            stacked: The number of its leading dimensions that index layers or experts.
            matrices: The parameter's logical matrices, by whose keys state may be saved.
        """
        if not isinstance(piece, ShardedTensor):
            name = key_of(piece)
            key = self._keys.get(name, "") if saved_kind == kind else ""
            # with the index in a chain, if the checkpoint's keys have one
            return replace(piece, key=key.removesuffix(name) + piece.key) if key else None
        forms = self._forms(piece, kind, saved_kind, stacked, matrices)
        return next((read for sources in forms if (read := assemble(piece, sources))), None)

    def _forms(
        self,
        piece: ShardedTensor,
        kind: str,
        saved_kind: str,
        stacked: int,
        matrices: Sequence[MatrixPart],
    ) -> Iterator[list[Source]]:
        """Yield the sources of the forms in which a checkpoint may have a piece's tensor."""
        parameter = piece.key.removeprefix(state_key(kind, ""))
        if parameter == piece.key:
            # state of one matrix, under its own key, or as a part of the parameter's
            if saved_kind == kind:
                yield self._of_tensor(piece.key, piece)
            if not self._reads_boxes:
                return
            yield [
                replace(part.source, key=key)
                for part in matrices
                if part.key(kind) == piece.key
                for key in self._present(state_key(saved_kind, part.source.key))
                if self._shape(key) == part.source.global_shape
            ]
            return
        yield self._of_tensor(state_key(saved_kind, parameter), piece)
        if not self._reads_boxes:
            return
        if stacked:
            yield self._of_layers(state_key(saved_kind, parameter), piece, stacked)
        yield [
            replace(source, key=key, global_shape=size)
            for source in self._boxes.get(parameter, ())
            if (size := self.catalogue.shapes.get(key := f"{source.key}.{saved_kind}"))
        ]
        yield [
            part.source.turned(key, part.shape)
            for part in matrices
            if part.source.key == parameter
            for key in self._present(part.key(saved_kind))
            if self._shape(key) == part.shape
        ]

    def _present(self, key: str) -> list[str]:
        """Return the full key of a tensor, if the checkpoint has it."""
        full = self._keys.get(key, "")
        return [full] if self.catalogue.shapes.get(full) is not None else []

    def _shape(self, full: str) -> tuple[int, ...]:
        return self.catalogue.shapes[full] or ()

    def _of_tensor(self, key: str, piece: ShardedTensor) -> list[Source]:
        sources = (tensor_sources(full, self._shape(full), piece) for full in self._present(key))
        return next(sources, [])

    def _of_layers(self, key: str, piece: ShardedTensor, stacked: int) -> list[Source]:
        """Return the tensors of the layers, or experts, that a piece of a stack has."""
        first, sizes = piece.global_offset, piece.local_shape
        ranges = (range(at, at + n) for at, n in zip(first[:stacked], sizes, strict=False))
        shape, ones = tuple(piece.global_shape[stacked:]), (1,) * stacked
        return [
            Source(full, (*ones, *shape), Box((*index, *zeros), (*ones, *shape)), (0,) * len(first))
            for zeros in ((0,) * len(shape),)
            for index in itertools.product(*ranges)
            for full in self._present(unstacked_key(key, index))
            if self._shape(full) == (*ones, *shape)
        ]


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
