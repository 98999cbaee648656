"""Checkpoints of Adam that Megatron wrote bucket by bucket (``dp_reshardable``).

There a kind of state is one flat tensor for each bucket of DDP's buffers. It can be read by any
optimizer over the same buffers, at any data-parallel size.
"""

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor


class BucketSpace:
    """Where the fragments of one distributed optimizer lie in such a checkpoint.

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

    def keys(self) -> set[str]:
        """Return the keys of all buckets, in every spelling, without a kind of state."""
        return {prefix + name for prefix in self.prefixes for name, *_ in self._places.values()}

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
