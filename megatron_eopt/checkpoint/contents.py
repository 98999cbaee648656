"""The optimizer state that a checkpoint has, according to its metadata."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

from megatron_eopt.base.names import MAINS, MOMENTUM, STEP
from megatron_eopt.checkpoint.buckets import BucketBox, put_together
from megatron_eopt.checkpoint.keys import split_key, state_key, unstacked_key
from megatron_eopt.checkpoint.parameter_space import ParameterSpace
from megatron_eopt.optimizers.continuation import SavedState
from megatron_eopt.optimizers.saved_groups import SavedGroups

type Shapes = Mapping[str, tuple[int, ...] | None]
"""Global shapes of a checkpoint's tensors by key; None for objects."""

type Piece = ShardedTensor | ShardedObject | ShardedTensorFactory
"""A box of a checkpoint's tensor, or an object, with the data to write from or to read into."""

type Pieces = tuple[Piece, ...]


def key_of(piece: Piece) -> str:
    """Return the checkpoint key of a piece."""
    return str(piece.key if isinstance(piece, ShardedTensor) else piece.unique_key)


class Contents:
    """The optimizer state that a checkpoint has: shapes of tensors, and parameter groups."""

    def __init__(
        self,
        shapes: Shapes,
        groups: SavedGroups | None = None,
        boxes: Mapping[str, Sequence[BucketBox]] | None = None,
    ) -> None:
        self.shapes = shapes
        self._boxes = boxes or {}
        self._groups = groups or SavedGroups()
        # kinds of state by parameter, or by stack of parameters
        self.kinds: dict[str, set[str]] = defaultdict(set)
        self.in_buckets: set[str] = set()  # kinds of state in buckets of many parameters
        # hashes of the names of parameters in buckets, by optimizer
        self.names_buckets: dict[str, set[str]] = defaultdict(set)
        self._keys: dict[str, str] = {}  # full key by key without the place in a chain
        for key in shapes:
            parts = split_key(key)
            if parts is None:
                continue
            # two optimizers of a chain have no parameter in common, so nothing is lost
            self._keys[key.removeprefix(parts.chain)] = key
            if parts.kind is None:
                if parts.name.startswith("buffer_params."):
                    optimizer, _, names = parts.name.rpartition(".")
                    self.names_buckets[optimizer].add(names)
                elif ".bucket_idx_" in parts.name:
                    self.in_buckets.add(parts.name.rpartition(".")[2])
            else:
                self.kinds[parts.name].add(parts.kind)

    def state_of(self, space: ParameterSpace, reader: str, *, in_bucket: bool) -> SavedState:
        """Return what the checkpoint has of a parameter.

        ``reader`` is the optimizer that loads it; ``in_bucket`` says whether its bucket is there.
        """
        # a parameter that is saved under several keys has a kind of state only if all of them have
        # it
        stacks = (
            self.kinds.get(stack, set()) | self.kinds.get(unstacked_key(stack, space.places), set())
            for stack in space.keys
        )
        # state of matrices is under the parameter's own name only
        kinds = set.intersection(*stacks) | self.kinds.get(space.name, set())
        kinds -= MAINS | {STEP}
        if kinds or not (in_bucket and self.in_buckets):
            return self._groups.state_of((space.name, space.key), kinds, reader)
        # megatron-core saves only Adam and SGD in this form
        optimizer = "sgd" if MOMENTUM in self.in_buckets else "adam"
        return SavedState(frozenset(self.in_buckets - MAINS - {STEP}), (optimizer,))

    def has_bucket(self, piece: Piece, params_key: str) -> bool:
        """Return whether the checkpoint has a bucket's state, of the parameters of ``params_key``.

        Without names in the checkpoint, sizes must do.
        """
        optimizer, _, names = params_key.removeprefix("optimizer.").rpartition(".")
        known = self.names_buckets.get(optimizer, {names})
        return names in known and self.shapes.get(piece.key) == tuple(piece.global_shape)

    def find_in_buckets(self, pieces: Pieces, own: str, kind: str) -> Pieces | None:
        """Return pieces of the kind ``own`` as what reads another kind from buckets.

        None if they do not say what is in them, or lack a part.
        """
        found = []
        for piece in pieces:
            boxes = self._boxes.get(piece.key.removeprefix(state_key(own, "")), ())
            it = boxes and put_together(piece, kind, boxes, self.shapes)
            if not it:
                return None
            found.append(it)
        return tuple(found)

    def shape_of(self, piece: Piece) -> tuple[int, ...] | None:
        """Return the shape of the tensor that a piece is of; None if it is not there."""
        return self.shapes.get(self._keys.get(key_of(piece), ""))

    def find(self, pieces: Pieces) -> Pieces | None:
        """Return the pieces under the checkpoint's keys; None if it lacks any.

        A vocabulary may have another size, because padding depends on tensor parallelism.
        """
        found = []
        for piece in pieces:
            name = key_of(piece)
            key = self._keys.get(name, "")
            shape = self.shapes.get(key)
            # an object, which has no shape, fits if it is there
            fits = key if shape is None else shape == tuple(piece.global_shape)
            if not (fits or (shape and getattr(piece, "allow_shape_mismatch", False))):
                return None
            # with the index in a chain, if the checkpoint's keys have one
            found.append(replace(piece, key=key.removesuffix(name) + piece.key))
        return tuple(found)


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
