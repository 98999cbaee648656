"""What an optimizer saves, and what it asks a checkpoint for.

Note [Saved state]
    Every value of state, wherever it lives, is a few pieces: boxes of the unsharded parameter, or
    of a tensor of a matrix's own. A fragment, a slab, a whole parameter, a DTensor's shard and a
    matrix at its owner differ only in which boxes. Each piece says whether this rank, of those that
    hold the same numbers, writes it. For reading, a value has several *sources*, which nothing
    asks for on saving, in the order in which they are preferred: as it is written
    (``by_parameter``), as another optimizer's state that may serve, or as megatron-core wrote
    either by bucket (``buckets``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from megatron_eopt.base.address import address_of
from megatron_eopt.base.names import (
    FIRST_MOMENT,
    MAIN_OF_REPLICATED,
    MAIN_OF_SHARDED,
    MOMENTUM,
    STEP,
)
from megatron_eopt.checkpoint.keys import key_apart, state_key
from megatron_eopt.checkpoint.parameter_space import Box, ParameterSpace
from megatron_eopt.optimizers.driver import Driver, Kept
from megatron_eopt.optimizers.member import Member
from megatron_eopt.stores.dtensors import local_of
from megatron_eopt.stores.interface import Stored
from megatron_eopt.stores.shard import Shard

type Shapes = Mapping[str, tuple[int, ...] | None]
"""Global shapes of a checkpoint's tensors by key; None for objects."""

MAINS = frozenset({MAIN_OF_SHARDED, MAIN_OF_REPLICATED})
"""Kinds of main weights."""


def kinds_to_read(kind: str) -> dict[str, bool]:
    """Return the kinds of a checkpoint that may serve, itself first, and which are Adam's."""
    if kind == MOMENTUM:
        return {kind: False, FIRST_MOMENT: True}
    return dict.fromkeys([kind, *sorted(MAINS)] if kind in MAINS else [kind], False)


@dataclass(frozen=True)
class Source:
    """One way in which a checkpoint may hold a value.

    Attributes:
        pieces: What to read, each with its destination as data.
        from_adam: Whether Adam's first moment stands in for a momentum.
        bucket: Prefix of the keys, where it is read out of a bucket.
        stacked: Leading dimensions of the pieces' tensors that number layers or experts.
    """

    pieces: tuple[ShardedTensor | ShardedObject, ...]
    from_adam: bool = False
    bucket: str | None = None
    stacked: int = 0

    def apart(self) -> "Source":
        """Return it in tensors of its own layer or expert; see Note [Keys]."""
        ones, zeros = (1,) * self.stacked, (0,) * self.stacked
        pieces = tuple(
            replace(
                piece,
                key=key_apart(piece.key, piece.global_offset[: self.stacked]),
                global_shape=ones + tuple(piece.global_shape[self.stacked :]),
                global_offset=zeros + tuple(piece.global_offset[self.stacked :]),
            )
            for piece in self.pieces
        )
        return replace(self, pieces=pieces, stacked=0)

    def forms(self) -> Iterator["Source"]:
        """Yield it as part of stacked tensors and, if there are such, apart from them."""
        yield self
        if self.stacked:
            yield self.apart()

    def in_chain(self, prefix: str) -> "Source":
        """Return it under a name of megatron-core's chain."""
        pieces = tuple(replace(piece, key=prefix + piece.key) for piece in self.pieces)
        return replace(self, pieces=pieces)

    def is_in(self, shapes: Shapes) -> bool:
        """Whether a checkpoint has it, in these shapes.

        A vocabulary, which is padded by the size of tensor parallelism, may have another size.
        """
        return all(
            piece.unique_key in shapes
            if isinstance(piece, ShardedObject)
            else shapes.get(piece.key) == tuple(piece.global_shape)
            or (piece.allow_shape_mismatch and shapes.get(piece.key) is not None)
            for piece in self.pieces
        )

    def is_in_another_shape(self, shapes: Shapes) -> bool:
        """Whether a checkpoint has a tensor of this name that cannot be this one."""
        return any(
            shapes.get(piece.key) not in (None, tuple(piece.global_shape))
            for piece in self.pieces
            if isinstance(piece, ShardedTensor)
        )


@dataclass(frozen=True)
class Whereabouts:
    """Where the values of one parameter are, on this rank and in checkpoints.

    Attributes:
        space: Where its elements lie in checkpoints.
        replica: Which copy this rank has; zeros for the one that is written.
        state: What the optimizer keeps of it on this rank, where steps are counted.
        shard: Where its matrices are, if it has such.
        stored: What this rank stores of it; None for a whole matrix at its owner.
    """

    space: ParameterSpace
    replica: tuple[int, ...]
    state: dict[str, Any] | None = None
    shard: Shard | None = None
    stored: Stored | None = None

    @cached_property
    def boxes(self) -> list[Box]:
        """The boxes of the unsharded parameter that this rank stores."""
        return self.space.boxes(self.stored.start, self.stored.stop) if self.stored else []

    @property
    def holds_first(self) -> bool:
        """Whether this rank stores the first element of the unsharded parameter."""
        return any(not any(b.sharded.global_offset[self.space.prepended :]) for b in self.boxes)

    def source(
        self, kind: str, boxes: Sequence[Box], flat: Tensor, *, from_adam: bool = False
    ) -> Source:
        """Return how boxes are written, or read: as part of stacked tensors."""
        pieces = tuple(
            replace(
                box.sharded,
                key=state_key(kind, box.sharded.key),
                data=box.view(flat),
                dtype=flat.dtype,
                replica_id=self.replica,
            )
            for box in boxes
        )
        return Source(pieces, from_adam, stacked=self.space.prepended)


@dataclass(frozen=True)
class Value:
    """One value of state that this rank holds.

    Attributes:
        where: What it belongs to.
        kind: Kind of state.
        own: How to write it.
        flat: All of it that this rank stores, if it is cut like its parameter.
        kept: Where it goes, if it is not.
        others: Finds other ways to read it.
    """

    where: Whereabouts
    kind: str
    own: Source
    flat: Tensor | None = None
    kept: Kept | None = None
    others: Callable[[], Iterable[Source]] = tuple

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """All ways to read it, the preferred ones first."""
        return (self.own, *self.others())

    @property
    def is_count(self) -> bool:
        """Whether it is a count of steps that may differ from what is common to all."""
        return self.flat is None and self.kept is None

    def is_of_another_matrix(self, shapes: Shapes) -> bool:
        """Whether a checkpoint has it under this name of a matrix of another shape."""
        return (
            self.kept is not None
            and not any(source.is_in(shapes) for source in self.sources)
            and any(source.is_in_another_shape(shapes) for source in self.sources)
        )

    def take(self, loaded: Sequence[Any], source: Source) -> None:
        """Write what was loaded from a source to where it belongs, unless it is there already."""
        for piece, value in zip(source.pieces, loaded, strict=True):
            if isinstance(piece, ShardedObject):
                assert self.kept is not None
                self.kept.replace(value)
            elif address_of(value) != address_of(piece.data):
                piece.data.copy_(value.view(piece.data.shape))

    def take_from_model(self) -> None:
        """Let main weights be what the model has."""
        item = self.where.stored
        assert item is not None
        assert self.flat is not None
        self.flat.copy_(local_of(item.param).detach().reshape(-1)[item.start : item.stop])

    def in_chain(self, prefix: str) -> "Value":
        """Return it written under a name of megatron-core's chain, and read under its own too."""
        named = self.read_in_chain([prefix])
        return replace(self, own=self.own.in_chain(prefix), others=lambda: named.sources)

    def read_in_chain(self, prefixes: Iterable[str]) -> "Value":
        """Return it read under names of megatron-core's chain too."""

        def others() -> Iterator[Source]:
            yield from self.sources[1:]
            unnamed = [source for source in self.sources if source.bucket is None]
            yield from (source.in_chain(prefix) for prefix in prefixes for source in unnamed)

        return replace(self, others=others)


def cut_like_weights(
    member: Member, item: Stored, driver: Driver, number: int
) -> dict[str, Tensor]:
    """Return main weights and state with a number for each that this rank stores of a parameter."""
    tensors = driver.saved_form(number, member.storage.tensors_of(item))
    return {
        kind: value
        for kind, value in tensors.items()
        if kind in MAINS or (kind != STEP and driver.is_cut_like_weights(kind, value))
    }


def kept_of(member: Member) -> Iterator[tuple[Driver, Tensor, Kept]]:
    """Yield what is not cut like a parameter, with its driver and the model's parameter."""
    for driver, params in zip(member.drivers, member.params, strict=True):
        with member.scene(driver) as (groups, state):
            for item in driver.kept(groups, state):
                yield driver, params[item.shard], item
