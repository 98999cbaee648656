"""Checkpoints of Adam that Megatron wrote bucket by bucket (``dp_reshardable``).

There a kind of state is one flat tensor for each bucket of DDP's buffers. It can be read by any
optimizer over the same buffers, at any data-parallel size.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

from megatron_eopt.checkpoint.saved_state import Shapes, Source, Value, kinds_to_read
from megatron_eopt.optimizers.member import Member
from megatron_eopt.stores.sharded import FragmentsOptimizer


class _Place(NamedTuple):
    """Where a fragment lies: the key of its bucket, the bucket's size, its first element there."""

    key: str
    size: int
    start: int


class BucketSpace:
    """Where the fragments of one distributed optimizer lie in such a checkpoint.

    Attributes:
        prefixes: What the checkpoint's keys of this optimizer may start with.
    """

    def __init__(self, optimizer: Any, number: int) -> None:
        name = f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}."
        chains = (f"chained_{number}.", *(("",) if number == 0 else ()))
        self.prefixes: tuple[str, ...] = tuple(chain + name for chain in chains)
        self._optimizer = optimizer
        self._of = dict(self._places())

    def keys(self) -> set[str]:
        """Return the keys of all buckets, in every spelling, without a kind of state."""
        return {prefix + place.key for prefix in self.prefixes for place in self._of.values()}

    def kinds(self, shapes: Shapes) -> dict[Tensor, set[str]]:
        """Return the kinds of state of every parameter; nothing if none are of this optimizer.

        There are none in a bucket of another size, which is another layout's.
        """
        kinds: dict[tuple[str, Any], set[str]] = {}
        for key, shape in shapes.items():
            bucket, _, kind = key.rpartition(".")
            kinds.setdefault((bucket, shape), set()).add(kind)
        for prefix in self.prefixes:
            if any(bucket.startswith(f"{prefix}gbuf_idx_") for bucket, _ in kinds):
                return {
                    param: kinds.get((prefix + its.key, (its.size,)), set())
                    for param, its in self._of.items()
                }
        return {}

    def sources(self, value: Value) -> Iterator[Source]:
        """Yield where such a checkpoint may have a value of a fragment."""
        if value.where.stored is None or value.flat is None:
            return
        flat, place = value.flat, self._of[value.where.stored.param]
        shape, size, start = tuple(flat.shape), (place.size,), (place.start,)
        for kind, from_adam in kinds_to_read(value.kind).items():
            for prefix in self.prefixes:
                key = f"{prefix}{place.key}.{kind}"
                piece = ShardedTensor(key, flat, flat.dtype, shape, size, start, None)
                yield Source((piece,), from_adam, prefix)

    def common(self, prefix: str) -> dict[str, ShardedObject]:
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

    def _places(self) -> Iterator[tuple[Tensor, _Place]]:
        buffers = self._optimizer.buffers
        for index, ranges in enumerate(self._optimizer.gbuf_ranges):
            for dtype, buckets in ranges.items():
                for number, bucket in enumerate(buckets):
                    key = f"gbuf_idx_{index}.dtype_{dtype}.bucket_idx_{number}"
                    size = buffers[index].buckets[number].numel_unpadded
                    for param, held in bucket["param_map"].items():
                        yield param, _Place(key, size, held["gbuf_world_in_bucket"].start)


def bucket_spaces(members: Sequence[Member]) -> dict[int, BucketSpace]:
    """Return where the optimizers of a chain that keep fragments may lie, by their places in it."""
    return {
        number: BucketSpace(member.storage, number)
        for number, member in enumerate(members)
        if isinstance(member.storage, FragmentsOptimizer) and not member.storage.is_stub_optimizer
    }


def source_in_bucket(value: Value, *, by_place: bool) -> Source:
    """Return a value's source in a bucket, if possible with a place in the chain, or without."""
    found = [source for source in value.sources if source.bucket is not None]
    return min(
        found or [value.own],
        key=lambda source: str(source.bucket).startswith("chained_") != by_place,
    )
