"""The optimizer state that a checkpoint has, according to its metadata."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_eopt.checkpoint.keys import key_apart, split_key

type Shapes = Mapping[str, tuple[int, ...] | None]
"""Global shapes of a checkpoint's tensors by key; None for objects."""

type Piece = ShardedTensor | ShardedObject
"""A box of a checkpoint's tensor, or an object, with the data to write from or to read into."""

type Pieces = tuple[Piece, ...]


def key_of(piece: Piece) -> str:
    """Return the checkpoint key of a piece."""
    return str(piece.key if isinstance(piece, ShardedTensor) else piece.unique_key)


class Contents:
    """The optimizer state that a checkpoint has."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        # kinds of state in the shape of the parameter, by parameter
        self.kinds: dict[str, set[str]] = defaultdict(set)
        self.in_buckets: set[str] = set()  # kinds of state in buckets of many parameters
        self._keys: dict[str, str] = {}  # full key by key without the place in a chain
        for key in shapes:
            parts = split_key(key)
            if parts is None:
                continue
            self._keys[key.removeprefix(parts.chain)] = key
            if parts.kind is None:
                if ".bucket_idx_" in parts.name:
                    self.in_buckets.add(parts.name.rpartition(".")[2])
            elif not parts.of_matrix:
                self.kinds[parts.name].add(parts.kind)

    def kinds_of(self, stacks: Sequence[str], places: Sequence[int]) -> set[str]:
        """Return the kinds of state of a parameter, in stacked tensors or in tensors of its own."""
        return set.intersection(
            *(self.kinds[stack] | self.kinds[key_apart(stack, places)] for stack in stacks)
        )

    def find(self, pieces: Pieces) -> Pieces | None:
        """Return the pieces under the checkpoint's keys; None if it lacks any.

        A vocabulary may have another size, because padding depends on tensor parallelism.
        """
        found = []
        for piece in pieces:
            name = key_of(piece)
            key = self._keys.get(name, "")
            shape = self.shapes.get(key)
            fits = key if shape is None else shape == tuple(piece.global_shape)
            if not (fits or (shape and getattr(piece, "allow_shape_mismatch", False))):
                return None
            found.append(replace(piece, key=key.removesuffix(name) + piece.key))
        return tuple(found)


def apart(pieces: Pieces, stacked: int) -> Pieces:
    """Return pieces of stacked tensors as tensors per layer or expert; see Note [Keys].

    ``stacked`` is the number of leading dimensions that index layers or experts.
    """
    ones, zeros = (1,) * stacked, (0,) * stacked
    return tuple(
        replace(
            piece,
            key=key_apart(piece.key, piece.global_offset[:stacked]),
            global_shape=ones + tuple(piece.global_shape[stacked:]),
            global_offset=zeros + tuple(piece.global_offset[stacked:]),
        )
        for piece in pieces
    )
