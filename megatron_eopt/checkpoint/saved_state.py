"""What an optimizer saves, what it asks a checkpoint for, and how both fit together.

Note [Saved state]
    Every value of state, wherever it lives, is a few pieces: boxes of the unsharded parameter, or
    of a tensor of a matrix's own. A fragment, a slab, a whole parameter, a DTensor's shard and a
    matrix at its owner differ only in which boxes. Each piece says whether this rank, of those that
    hold the same numbers, writes it. For reading, a value has several *sources*, in the order in
    which they are preferred: as it is written now, as other storages or an earlier release wrote
    it, or another optimizer's state that may serve.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from megatron_eopt.base.names import (
    FIRST_MOMENT,
    MAIN_OF_REPLICATED,
    MAIN_OF_SHARDED,
    MOMENTUM,
    STEP,
)
from megatron_eopt.checkpoint.buckets import BucketSpace
from megatron_eopt.checkpoint.keys import (
    kind_of,
    matrix_state_key,
    of_first_release,
    saved_keys,
    state_key,
)
from megatron_eopt.checkpoint.parameter_space import Box, ParameterSpace
from megatron_eopt.matrices import matrix_rows
from megatron_eopt.optimizers.driver import Kept
from megatron_eopt.stores.interface import Stored
from megatron_eopt.stores.shard import Shard

type Shapes = Mapping[str, tuple[int, ...] | None]
"""Global shapes of a checkpoint's tensors by key; None for objects."""

MAINS = frozenset({MAIN_OF_SHARDED, MAIN_OF_REPLICATED})
"""Kinds of main weights."""


@dataclass(frozen=True)
class Source:
    """One way in which a checkpoint may hold a value.

    Attributes:
        pieces: What to read, each with its destination as data.
        note: What to say if it is used; nothing for the usual way.
        from_adam: Whether Adam's first moment stands in for a momentum.
        bucket: Prefix of the keys, where it is read out of a bucket.
    """

    pieces: tuple[ShardedTensor | ShardedObject, ...]
    note: str = ""
    from_adam: bool = False
    bucket: str | None = None

    def is_in(self, shapes: Shapes) -> bool:
        """Whether a checkpoint has it, in these shapes."""
        for piece in self.pieces:
            if isinstance(piece, ShardedObject):
                if piece.unique_key not in shapes:
                    return False
            elif shapes.get(piece.key) != tuple(piece.global_shape):
                return False
        return True

    @property
    def keys(self) -> set[str]:
        """The keys of what is read."""
        return saved_keys(list(self.pieces))


@dataclass(frozen=True)
class Owner:
    """What a value is state of.

    Attributes:
        name: The parameter, for messages.
        keys: Keys of the checkpoint's tensors that it is part of, without optimizer prefixes.
        stored: What this rank stores of it; None for a whole matrix at its owner.
        state: What the optimizer keeps of it on this rank, where steps are counted.
    """

    name: str
    keys: tuple[str, ...]
    stored: Stored | None = None
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class Value:
    """One value of state that this rank holds.

    Attributes:
        owner: What it belongs to.
        kind: Kind of state.
        sources: How to write it, and other ways to read it.
        flat: All of it that this rank stores, if it is cut like its parameter.
        kept: Where it goes, if it is not.
        is_count: Whether it is a count of steps that may differ from what is common to all.
    """

    owner: Owner
    kind: str
    sources: tuple[Source, ...]
    flat: Tensor | None = None
    kept: Kept | None = None
    is_count: bool = False

    def take(self, loaded: Sequence[Any], source: Source) -> None:
        """Write what was loaded from a source to where it belongs, unless it is there already."""
        for piece, value in zip(source.pieces, loaded, strict=True):
            if isinstance(piece, ShardedObject):
                assert self.kept is not None
                self.kept.replace(value)
            elif value.data_ptr() != piece.data.data_ptr():
                piece.data.copy_(value.view(piece.data.shape))


@dataclass(frozen=True)
class Whereabouts:
    """Where the values of one parameter are in checkpoints.

    Attributes:
        space: Where its elements lie.
        replica: Which copy this rank has; zeros for the one that is written.
        state: What the optimizer keeps of it.
        shard: Where its matrices are, if it has such.
        buckets: Where it lies by bucket, if that is known.
    """

    space: ParameterSpace
    replica: tuple[int, ...]
    state: dict[str, Any] | None = None
    shard: Shard | None = None
    buckets: BucketSpace | None = None

    def holds_first(self, stored: Stored) -> bool:
        """Whether this rank stores the first element of the unsharded parameter."""
        boxes = self.space.boxes(stored.start, stored.stop)
        return any(not any(b.sharded.global_offset[self.space.prepended :]) for b in boxes)

    def piece(self, box: Box, key: str, view: Tensor) -> ShardedTensor:
        """Return what is written of a box, or read into it."""
        return replace(box.sharded, key=key, data=view, dtype=view.dtype, replica_id=self.replica)


def stored_values(
    stored: Stored, tensors: Mapping[str, Tensor], where: Whereabouts
) -> Iterator[Value]:
    """Yield what is cut like a stored part of a parameter.

    Args:
        stored: What this rank stores of it.
        tensors: Main weights and state, each of as many elements, by kind.
        where: Where these are in checkpoints.
    """
    owner = Owner(where.space.name, where.space.keys, stored, where.state)
    boxes = where.space.boxes(stored.start, stored.stop)
    for kind, values in tensors.items():
        flat = values.detach().reshape(-1)
        kinds = [(kind, "")]
        if kind in MAINS:
            kinds += [(other, "") for other in sorted(MAINS - {kind})]
        if kind == MOMENTUM:
            kinds.append((FIRST_MOMENT, f"{MOMENTUM} is taken from {FIRST_MOMENT}"))
        sources = []
        for other, note in kinds:
            pieces = [where.piece(b, state_key(other, b.sharded.key), b.view(flat)) for b in boxes]
            sources.append(Source(tuple(pieces), note, from_adam=bool(note)))
        if kind not in MAINS:
            sources += _of_matrices(kind, flat, where)
            sources += _as_one_matrix(kind, boxes, flat, where)
        if where.buckets is not None:
            sources += [
                Source(
                    (where.buckets.piece(stored.param, flat, other, prefix),),
                    note,
                    from_adam=bool(note),
                    bucket=prefix,
                )
                for other, note in kinds
                for prefix in where.buckets.prefixes
            ]
        yield Value(owner, kind, tuple(sources), flat)


def _of_matrices(kind: str, flat: Tensor, where: Whereabouts) -> Iterator[Source]:
    """Yield the source in which release 0.1.0 kept such state matrix by matrix, at owners."""
    if where.shard is None:
        return
    pieces = []
    for matrix, layout in enumerate(where.shard.layouts):
        for row in layout.piece(where.shard.ranks.rank).table:
            _, top, left, height, width, offset, stride, *_ = row.tolist()
            view = flat.as_strided((height, width), (stride, 1), flat.storage_offset() + offset)
            pieces.append(
                ShardedTensor(
                    matrix_state_key(kind, f"{where.space.name}.{matrix}"),
                    view,
                    view.dtype,
                    (height, width),
                    layout.shape,
                    (top, left),
                    None,
                    replica_id=where.replica,
                )
            )
    yield Source(tuple(pieces))


def _as_one_matrix(
    kind: str, boxes: Sequence[Box], flat: Tensor, where: Whereabouts
) -> Iterator[Source]:
    """Yield the source in which release 0.1.0 kept such state of a whole parameter as a matrix's.

    It did so without tensor parallelism alone; with it, a part was lost.
    """
    prepended = where.space.prepended
    pieces = []
    for box in boxes:
        sharded = replace(
            box.sharded,
            local_shape=box.sharded.local_shape[prepended:],
            global_shape=box.sharded.global_shape[prepended:],
            global_offset=box.sharded.global_offset[prepended:],
        )
        view = box.view(flat)
        inner = Box(sharded, box.start, box.strides[prepended:])
        key = matrix_state_key(kind, f"{where.space.name}.0")
        pieces.append(where.piece(inner, key, view.view(sharded.local_shape)))
    yield Source(tuple(pieces))


def kept_value(kept: Kept, where: Whereabouts) -> Value:
    """Return what a checkpoint holds of a value that is not cut like its parameter."""
    kind = kind_of(kept.path)
    replica = (*where.replica, int(not kept.writes))
    owner = Owner(where.space.name, where.space.keys, state=where.state)
    if kept.per_element and where.shard is not None:
        boxes = _boxes_of_matrix(kept, where.shard, where.space)
        if boxes:
            own = replace(where, replica=replica)
            pieces = (
                own.piece(box, state_key(kind, box.sharded.key), box.view(kept.value))
                for box in boxes
            )
            return Value(owner, kind, (Source(tuple(pieces)),), kept=kept)
    name = f"{where.space.name}.{kept.matrix}"
    if kept.slab is not None:
        name += ".tp{}of{}".format(*kept.slab)
    spellings = dict.fromkeys((kind, of_first_release(kept.path)))
    sources = [Source((_own(matrix_state_key(k, name), kept, replica),)) for k in spellings]
    return Value(owner, kind, tuple(sources), kept=kept)


def _own(key: str, kept: Kept, replica: tuple[int, ...]) -> ShardedTensor | ShardedObject:
    if not isinstance(kept.value, Tensor):
        return ShardedObject(key, kept.value, (1,), (0,), replica_id=replica)
    # a tensor in a checkpoint has at least one dimension
    data = kept.value.detach()
    data = data.view(data.shape or (1,))
    shape = kept.whole or tuple(data.shape)
    offset = kept.offset or (0,) * data.dim()
    return ShardedTensor(
        key, data, data.dtype, tuple(data.shape), shape, offset, None, replica_id=replica
    )


def _boxes_of_matrix(kept: Kept, shard: Shard, space: ParameterSpace) -> list[Box]:
    """Return the boxes of the unsharded parameter that a matrix is; none if it has no such."""
    base = space.sharded
    shape = tuple(base.global_shape[space.prepended :])
    if len(space.keys) > 1 or shape != (shard.split.shape if len(shape) == 2 else kept.value.shape):
        return []
    before = base.global_offset[: space.prepended]
    ones = (1,) * space.prepended
    if len(shape) != 2:
        whole = replace(
            base, local_shape=(*ones, *shape), global_offset=(*before, *(0 for _ in shape))
        )
        return [Box(whole, 0, (*(kept.value.numel() for _ in ones), *kept.value.stride()))]
    cols = shape[1]
    boxes = []
    for first, row, count in matrix_rows(shard.split, 1, 0, -1)[kept.matrix].triples():
        box = replace(base, local_shape=(*ones, count, cols), global_offset=(*before, first, 0))
        boxes.append(Box(box, row * cols, (*(kept.value.numel() for _ in ones), cols, 1)))
    return boxes


def count_value(owner: Owner, place: str, replica: tuple[int, ...]) -> Value:
    """Return what a checkpoint holds of a count of steps of one parameter, or one matrix.

    Args:
        owner: What it counts for.
        place: Name of the matrix, 0 for a parameter.
        replica: Which copy this rank has; zeros for the one that is written.
    """
    assert owner.state is not None
    key = matrix_state_key(STEP, f"{owner.name}.{place}")
    piece = ShardedObject(key, int(owner.state[STEP]), (1,), (0,), replica_id=replica)
    return Value(owner, STEP, (Source((piece,)),), is_count=True)


def in_chain(value: Value, number: int, *, first: bool) -> Value:
    """Return a value that may also be found under the names that megatron-core's chain gives.

    Args:
        value: The value.
        number: Place of its optimizer in the chain.
        first: Whether these names come first.
    """
    named = tuple(
        replace(source, pieces=tuple(_renamed(piece, number) for piece in source.pieces))
        for source in value.sources
        if source.bucket is None
    )
    sources = (*named, *value.sources) if first else (*value.sources, *named)
    return replace(value, sources=sources)


def _renamed[T: ShardedTensor | ShardedObject](piece: T, number: int) -> T:
    return replace(piece, key=f"chained_{number}.{piece.key}")
