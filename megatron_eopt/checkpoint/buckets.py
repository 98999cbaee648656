"""State that is saved by bucket, which loads at any layout.

Megatron's Adam saves each bucket of DDP's buffers as a flat tensor of many parameters of one
model-parallel rank, for each kind of state (``dp_reshardable``). This package saves beside it which
box of which parameter is where in a bucket.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint.metadata import Metadata

from megatron_eopt.checkpoint.files import object_at
from megatron_eopt.checkpoint.keys import BUCKET_PARAMS, buffer_params_name, split_key
from megatron_eopt.checkpoint.parameter_space import parameter_spaces
from megatron_eopt.checkpoint.sources import Source
from megatron_eopt.layouts.boxes import Box

BY_BUCKET = "dp_reshardable"
"""Megatron's name for this form of state."""

_SUFFIX = "/shard_0_1"
"""What dist_checkpointing appends to the key of an object."""

_GROUPS = re.compile(
    rf"((?P<chain>(?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_\d+\.)optimizer{_SUFFIX}"
)
"""The key of the groups that are saved beside the buckets of a model-parallel rank."""


type BucketBoxes = Mapping[str, Sequence[Source]]
"""By parameter: its boxes, whose keys and shapes are of a bucket, without a kind of state."""


def read_buckets(folder: Path, metadata: Metadata) -> tuple[BucketBoxes, list[dict[str, Any]]]:
    """Read where parameters are in buckets, and groups and loss scale of each optimizer."""
    boxes: dict[str, dict[Box, Source]] = {}
    common: dict[str, dict[str, Any]] = {}
    saved = metadata.state_dict_metadata
    for key in saved:
        match = _GROUPS.fullmatch(key)
        # all model-parallel ranks have the same groups
        if match is not None and match["chain"] not in common:
            keys = {name: f"{match[1]}{name}{_SUFFIX}" for name in ("optimizer", "grad_scaler")}
            common[match["chain"]] = {
                n: object_at(folder, metadata, key)[0] for n, key in keys.items() if key in saved
            }
        parts = split_key(key)
        if parts is None or parts.kind is not None or not parts.name.startswith(BUCKET_PARAMS):
            continue
        (layout,) = object_at(folder, metadata, key)
        if not isinstance(layout, Mapping):
            continue  # written before boxes were saved
        prefix = next(p for p in layout["prefixes"] if f"{p}optimizer{_SUFFIX}" in saved)
        for parameter, bucket, first, strides, shape, offset in layout["boxes"]:
            box = Box(offset, shape)
            # several model-parallel ranks may have a parameter
            source = in_bucket(prefix + bucket, first, strides, box)
            boxes.setdefault(parameter, {}).setdefault(box, source)
    return {key: list(by_box.values()) for key, by_box in boxes.items()}, [*common.values()]


def in_bucket(bucket: str, first: int, strides: tuple[int, ...], box: Box) -> Source:
    """Return a box of a parameter in a bucket, of any kind of state."""
    return Source(bucket, (), box, (first,), strides)


class BucketSpace:
    """Where one optimizer's parameters are in a checkpoint by bucket.

    Args:
        optimizer: Megatron's distributed optimizer.
        prefixes: Possible prefixes of its keys, with and without the index in a chain; the likely
            one first.
    """

    def __init__(self, optimizer: Any, prefixes: tuple[str, ...]) -> None:
        name = f"optimizer.distributed.dp_group_idx_{optimizer.data_parallel_group_idx}."
        self.prefixes = tuple(prefix + name for prefix in prefixes)
        label = f"{next(filter(None, prefixes))}{optimizer.data_parallel_group_idx}"
        self.params_name = buffer_params_name(label, optimizer.buffer_params)
        self._optimizer = optimizer

    def boxes(self, model_state: Mapping[str, Any]) -> Iterator[tuple[str, int, Source]]:
        """Yield key, size of the bucket and box of all parameters in the buckets.

        Those of other data-parallel ranks, too.
        """
        buffers = self._optimizer.buffers
        spaces = parameter_spaces(model_state, [p for b in buffers for p in b.param_index_map])
        # names and offsets as in megatron-core's ``sharded_param_state_dp_reshardable``
        for index, (buffer, (dtype,)) in enumerate(
            zip(buffers, self._optimizer.gbuf_ranges, strict=True)
        ):
            for param, (start, _, number) in buffer.param_index_map.items():
                name = f"gbuf_idx_{index}.dtype_{dtype}.bucket_idx_{number}"
                bucket = buffer.buckets[number]
                start -= bucket.offset
                for piece, shape, offset, first, strides in spaces[param].boxes(0, param.numel()):
                    box = in_bucket(name, start + first, strides, Box(offset, shape))
                    yield piece.key, bucket.numel_unpadded, box

    def described(self, model_state: Mapping[str, Any]) -> ShardedObject:
        """Return the object that says which parameters are where in the buckets."""
        boxes = [
            (key, it.key, *it.global_offset, it.strides, it.box.shape, it.box.offset)
            for key, _, it in self.boxes(model_state)
        ]
        layout = {"prefixes": self.prefixes, "boxes": boxes}
        return ShardedObject(
            f"optimizer.{self.params_name}", layout, (1,), (0,), replica_id=self._replica
        )

    @property
    def _replica(self) -> tuple[int, int, int]:
        instance = self._optimizer.distributed_optimizer_instance_id
        return (instance, 0, self._optimizer.data_parallel_group.rank())

    def common(self) -> Mapping[str, ShardedObject]:
        """Return the objects that are stored with the buckets: groups and loss scale."""
        names = ("optimizer", *(("grad_scaler",) if self._optimizer.grad_scaler else ()))
        prefix = self.prefixes[0]
        return {
            name: ShardedObject(f"{prefix}{name}", None, (1,), (0,), replica_id=self._replica)
            for name in names
        }
