"""Reads checkpoints of Adam that Megatron wrote bucket by bucket (``dp_reshardable``).

There a kind of state is one flat tensor for each bucket of DDP's buffers. It can be read by any
optimizer over the same buffers, at any data-parallel size.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor

__all__ = ["BucketSpace"]


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
    """

    def __init__(self, optimizer: Any, number: int) -> None:
        self._name = f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}."
        self._prefixes = (f"chained_{number}.", "") if number == 0 else (f"chained_{number}.",)
        self._optimizer = optimizer

    def prefix(self, available: Collection[str]) -> str | None:
        """Return what the checkpoint's keys of this optimizer start with; None if it has none."""
        for prefix in self._prefixes:
            if any(key.startswith(f"{prefix}{self._name}gbuf_idx_") for key in available):
                return prefix + self._name
        return None

    def kinds(self, available: Collection[str], prefix: str) -> dict[Tensor, set[str]]:
        """Return the kinds of state that a checkpoint has of every parameter."""
        kinds: dict[str, set[str]] = {}
        for key in available:
            bucket, _, kind = key.rpartition(".")
            kinds.setdefault(bucket, set()).add(kind)
        return {param: kinds.get(prefix + p.key, set()) for param, p in self._places()}

    def requests(
        self,
        tensors: Mapping[Tensor, Mapping[str, Tensor]],
        sources: Mapping[Tensor, Mapping[str, str]],
        prefix: str | None = None,
    ) -> dict[str, Any]:
        """Return what to ask for.

        Args:
            tensors: Of every parameter, by kind of state, where its values go.
            sources: Of every parameter, by kind of state, the kind in the checkpoint.
            prefix: What the checkpoint's keys start with; None means without the chain's prefix.
        """
        prefix = self._name if prefix is None else prefix
        places = dict(self._places())
        fragments: dict[int, dict[str, ShardedTensor]] = {}
        for number, param in enumerate(tensors):
            place = places[param]
            fragments[number] = {
                kind: ShardedTensor(
                    f"{prefix}{place.key}.{source}",
                    tensors[param][kind],
                    tensors[param][kind].dtype,
                    tuple(tensors[param][kind].shape),
                    (place.size,),
                    (place.start,),
                    None,
                )
                for kind, source in sources[param].items()
            }
        asked: dict[str, Any] = {"fragments": fragments}
        for name in ("optimizer", *(("grad_scaler",) if self._optimizer.grad_scaler else ())):
            asked[name] = ShardedObject(
                f"{prefix}{name}",
                None,
                (1,),
                (0,),
                replica_id=(
                    self._optimizer.distributed_optimizer_instance_id,
                    0,
                    self._optimizer.data_parallel_group.rank(),
                ),
            )
        return asked

    def _places(self) -> Iterator[tuple[Tensor, _Place]]:
        buffers = self._optimizer.buffers
        for index, ranges in enumerate(self._optimizer.gbuf_ranges):
            for dtype, buckets in ranges.items():
                for number, bucket in enumerate(buckets):
                    key = f"gbuf_idx_{index}.dtype_{dtype}.bucket_idx_{number}"
                    size = buffers[index].buckets[number].numel_unpadded
                    for param, held in bucket["param_map"].items():
                        yield param, _Place(key, size, held["gbuf_world_in_bucket"].start)
