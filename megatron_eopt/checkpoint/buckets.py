"""Checkpoints of Adam that Megatron wrote bucket by bucket (``dp_reshardable``).

There a kind of state is one flat tensor for each bucket of DDP's buffers. It can be read by any
optimizer over the same buffers, at any data-parallel size.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor


@dataclass(frozen=True)
class _Place:
    """Where a fragment lies: the key of its bucket, the bucket's size, its first element there."""

    key: str
    size: int
    start: int


class BucketSpace:
    """Where the fragments of one distributed optimizer lie in such a checkpoint.

    Args:
        optimizer: The distributed optimizer.
        number: Its place in its chain.

    Attributes:
        prefixes: What the checkpoint's keys of this optimizer may start with.
    """

    def __init__(self, optimizer: Any, number: int) -> None:
        name = f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}."
        chains = (f"chained_{number}.", *(("",) if number == 0 else ()))
        self.prefixes: tuple[str, ...] = tuple(chain + name for chain in chains)
        self._optimizer = optimizer
        self._of = dict(self._places())

    def prefix(self, available: Collection[str]) -> str | None:
        """Return what a checkpoint's keys start with; None if it has none of this optimizer."""
        for prefix in self.prefixes:
            if any(key.startswith(f"{prefix}gbuf_idx_") for key in available):
                return prefix
        return None

    def kinds(self, available: Collection[str], prefix: str) -> dict[Tensor, set[str]]:
        """Return the kinds of state that a checkpoint has of every parameter."""
        kinds: dict[str, set[str]] = {}
        for key in available:
            bucket, _, kind = key.rpartition(".")
            kinds.setdefault(bucket, set()).add(kind)
        return {param: kinds.get(prefix + place.key, set()) for param, place in self._of.items()}

    def piece(self, param: Tensor, values: Tensor, kind: str, prefix: str) -> ShardedTensor:
        """Return what to read of one kind of state.

        Args:
            param: The parameter.
            values: Where this rank's part goes, flat.
            kind: The kind in the checkpoint.
            prefix: What the checkpoint's keys start with.
        """
        place = self._of[param]
        key = f"{prefix}{place.key}.{kind}"
        shape, size = tuple(values.shape), (place.size,)
        return ShardedTensor(key, values, values.dtype, shape, size, (place.start,), None)

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
