"""What an optimizer saves, and what it asks a checkpoint for.

Note [Saved state]
    Every value of state, wherever it lives, is a few pieces: boxes of the unsharded parameter, or
    of a tensor of a matrix's own. A fragment, a slab, a whole parameter, a DTensor's shard and a
    matrix at its owner differ only in which boxes. Each piece says whether this rank, of those that
    hold the same numbers, writes it. A value is read from where it is written, or from what may
    serve in its place: another kind of state, or a bucket of megatron-core's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

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
from megatron_eopt.checkpoint.contents import Contents, Piece, Pieces, Shapes, apart
from megatron_eopt.checkpoint.keys import kind_of, matrix_state_key, state_key
from megatron_eopt.checkpoint.parameter_space import Box, ParameterSpace
from megatron_eopt.optimizers.driver import Driver, Kept
from megatron_eopt.optimizers.stepper import Stepper
from megatron_eopt.storage.dtensors import local_of
from megatron_eopt.storage.interface import Stored

MAINS = frozenset({MAIN_OF_SHARDED, MAIN_OF_REPLICATED})
"""Kinds of main weights."""


class Source(NamedTuple):
    """Where a value is written, or read."""

    pieces: Pieces  # each with its origin, or destination, as data
    from_adam: bool = False  # whether Adam's first moment stands in for a momentum
    bucket: str | None = None  # prefix of the keys, where it is read out of a bucket


class BucketSpace:
    """Where the fragments of one distributed optimizer lie in a checkpoint that is by bucket.

    So Megatron may write Adam (``dp_reshardable``): a kind of state is one flat tensor for each
    bucket of DDP's buffers. It can be read by any optimizer over the same buffers, at any
    data-parallel size.

    Args:
        optimizer: Megatron's distributed optimizer.
        prefixes: What its keys may start with, in a chain or outside of one; the likely one first.
    """

    def __init__(self, optimizer: Any, prefixes: tuple[str, ...]) -> None:
        name = f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}."
        self.prefixes = tuple(prefix + name for prefix in prefixes)
        self._optimizer = optimizer
        # the bucket's name and size, and the fragment's first element there
        self._places: dict[Tensor, tuple[str, int, int]] = {}
        for index, ranges in enumerate(optimizer.gbuf_ranges):
            for dtype, buckets in ranges.items():
                for number, bucket in enumerate(buckets):
                    name = f"gbuf_idx_{index}.dtype_{dtype}.bucket_idx_{number}"
                    size = optimizer.buffers[index].buckets[number].numel_unpadded
                    for param, held in bucket["param_map"].items():
                        self._places[param] = name, size, held["gbuf_world_in_bucket"].start

    def piece(self, param: Tensor, kind: str, flat: Tensor, prefix: str) -> ShardedTensor:
        """Return where such a checkpoint has a kind of state of a fragment."""
        name, size, start = self._places[param]
        key = f"{prefix}{name}.{kind}"
        shape = tuple(flat.shape)
        return ShardedTensor(key, flat, flat.dtype, shape, (size,), (start,), None)

    def common(self, prefix: str) -> Mapping[str, ShardedObject]:
        """Return what such a checkpoint keeps with the buckets: groups and the loss scale."""
        replica = (
            self._optimizer.distributed_optimizer_instance_id,
            0,
            self._optimizer.data_parallel_group.rank(),
        )
        names = ("optimizer", *(("grad_scaler",) if self._optimizer.grad_scaler else ()))
        return {
            name: ShardedObject(f"{prefix}{name}", None, (1,), (0,), replica_id=replica)
            for name in names
        }


@dataclass(frozen=True)
class Whereabouts:
    """Where the values of one parameter are, on this rank and in checkpoints."""

    space: ParameterSpace  # where its elements lie in checkpoints
    replica: tuple[int, ...]  # which copy this rank has; zeros for the one that is written
    # what the optimizer keeps of it on this rank, where steps are counted
    state: dict[str, Any] | None = None
    stored: Stored | None = None  # what this rank stores; None for a whole matrix at its owner
    buckets: BucketSpace | None = None  # where it lies in checkpoints by bucket, if it may

    @cached_property
    def boxes(self) -> list[Box]:
        """The boxes of the unsharded parameter that this rank stores."""
        item = self.stored
        return [] if item is None else list(self.space.boxes(item.start, item.stop))

    @property
    def holds_first(self) -> bool:
        """Whether this rank stores the first element of the unsharded parameter."""
        return any(not any(b.offset[self.space.prepended :]) for b in self.boxes)


@dataclass(frozen=True)
class Value:
    """One value of state that this rank holds."""

    where: Whereabouts  # what it belongs to
    kind: str  # kind of state
    pieces: Pieces  # how it is written
    stacked: int = 0  # leading dimensions of the pieces' tensors that number layers or experts
    flat: Tensor | None = None  # all of it that this rank stores, if it is cut like its parameter
    kept: Kept | None = None  # where it goes, if it is not

    @property
    def is_count(self) -> bool:
        """Whether it is a count of steps that may differ from what is common to all."""
        return self.flat is None and self.kept is None

    def forms(self, kind: str) -> Iterator[Pieces]:
        """Yield it, as this kind of state, as part of stacked tensors and apart from them."""
        own, other = state_key(self.kind, ""), state_key(kind, "")
        pieces = tuple(replace(p, key=p.key.replace(own, other, 1)) for p in self.pieces)
        yield pieces
        if self.stacked:
            yield apart(pieces, self.stacked)

    def source_in(self, contents: Contents, *, momentum_from_adam: bool) -> Source | None:
        """Return what a checkpoint has of it, or what may serve in its place; None without."""
        kinds = [self.kind]
        if self.kind in MAINS:
            kinds += sorted(MAINS - {self.kind})
        elif self.kind == MOMENTUM and self.flat is not None and momentum_from_adam:
            kinds.append(FIRST_MOMENT)
        for kind in kinds:
            found = [contents.find(pieces) for pieces in self.forms(kind)]
            sources = [Source(pieces) for pieces in found if pieces is not None]
            for source in (*sources, self.source_in_bucket(kind, contents.shapes)):
                if source is not None:
                    return source._replace(from_adam=kind == FIRST_MOMENT != self.kind)
        return None

    def source_in_bucket(self, kind: str, shapes: Shapes | None = None) -> Source | None:
        """Return where a kind of state is in a bucket; None if it is in none.

        Where nobody knows the checkpoint yet, it is where megatron-core would read it.
        """
        stored, buckets = self.where.stored, self.where.buckets
        if buckets is None or stored is None or self.flat is None:
            return None
        for prefix in buckets.prefixes:
            piece = buckets.piece(stored.param, kind, self.flat, prefix)
            if shapes is None or shapes.get(piece.key) == piece.global_shape:
                return Source((piece,), bucket=prefix)
        return None

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


def cut_value(kind: str, value: Tensor, where: Whereabouts) -> Value:
    """Return main weights or state that are cut like what this rank stores of a parameter."""
    flat = value.detach().reshape(-1)
    pieces = tuple(
        box.holding(flat, state_key(kind, box.piece.key), where.replica) for box in where.boxes
    )
    return Value(where, kind, pieces, where.space.prepended, flat)


def kept_value(kept: Kept, where: Whereabouts, count: int) -> Value:
    """Return what a checkpoint holds of a value that is not cut like its parameter.

    Args:
        kept: The value.
        where: What it belongs to.
        count: How many matrices its parameter is split into.
    """
    kind = kind_of(kept.path)
    base, prepended = where.space.sharded, where.space.prepended
    whole = tuple(base.global_shape[prepended:])
    is_parameters = kept.per_element and count == len(where.space.keys) == 1
    if is_parameters and tuple(kept.value.shape) == whole:
        # as those keep it that do not bring matrices together
        key = state_key(kind, base.key)
        value = kept.value.view((*(1,) * prepended, *whole))
        offset = (*where.space.places, *(0 for _ in whole))
    else:
        key = matrix_state_key(kind, where.space.name, (kept.matrix, count), kept.slab)
        prepended, value, offset = 0, kept.value, ()
    replica = (*where.replica, int(not kept.writes))
    piece: Piece = ShardedObject(key, value, (1,), (0,), replica_id=replica)
    if isinstance(value, Tensor):
        # a tensor in a checkpoint has at least one dimension
        data = value.detach().view(value.shape or (1,))
        shape, offset = tuple(data.shape), offset or (0,) * data.dim()
        whole = base.global_shape if prepended else shape
        piece = ShardedTensor(key, data, data.dtype, shape, whole, offset, None, replica)
    return Value(where, kind, (piece,), prepended, kept=kept)


def cut_like_weights(
    stepper: Stepper, item: Stored, driver: Driver, number: int
) -> dict[str, Tensor]:
    """Return main weights and state with a number for each that this rank stores of a parameter."""
    tensors = driver.saved_form(number, stepper.storage.tensors_of(item))
    return {
        kind: value
        for kind, value in tensors.items()
        if kind in MAINS or (kind != STEP and driver.is_cut_like_weights(kind, value))
    }


def kept_of(stepper: Stepper) -> Iterator[tuple[Driver, Tensor, Kept]]:
    """Yield what is not cut like a parameter, with its driver and the model's parameter."""
    for driver, params in zip(stepper.drivers, stepper.params, strict=True):
        with stepper.groups_and_state(driver) as (groups, state):
            for item in driver.kept(groups, state):
                yield driver, params[item.shard], item
