"""Reads state that was saved by bucket, at any layout.

Megatron's Adam saves each bucket as a flat tensor of many parameters of one model-parallel rank.
This package saves beside it which box of which parameter is where in a bucket.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from megatron_eopt.checkpoint.files import object_at
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.checkpoint.sources import Source
from megatron_eopt.layouts.boxes import Box

BY_BUCKET = "dp_reshardable"
"""Megatron's name for this form of state."""

type SavedBox = tuple[str, str, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""What is saved: parameter, bucket, and first element, strides, shape and offset of a box."""

_SUFFIX = "/shard_0_1"
"""What dist_checkpointing appends to the key of an object."""

_GROUPS = re.compile(
    rf"((?P<chain>(?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_\d+\.)optimizer{_SUFFIX}"
)
"""The key of the groups that are saved beside the buckets of a model-parallel rank."""


class BucketBox(NamedTuple):
    """A box of a parameter in a bucket of a checkpoint."""

    bucket: str  # key of the bucket's tensors, without the kind of state
    first: int  # index of the box's first element in the bucket
    strides: tuple[int, ...]  # in the bucket
    shape: tuple[int, ...]
    offset: tuple[int, ...]  # in the unsharded parameter

    def source(self, kind: str, shapes: Mapping[str, tuple[int, ...] | None]) -> Source | None:
        """Return where a kind of state is read; None if the checkpoint does not have it."""
        key = f"{self.bucket}.{kind}"
        size = shapes.get(key)
        box = Box(self.offset, self.shape)
        return None if size is None else Source(key, size, box, (self.first,), self.strides)


@dataclass(frozen=True)
class SavedBuckets:
    """What a checkpoint says about its buckets."""

    boxes: Mapping[str, Sequence[BucketBox]] = field(default_factory=dict)  # by parameter
    # groups and loss scale of each optimizer of the chain
    common: Sequence[Mapping[str, Any]] = ()


def read_buckets(folder: Path, metadata: Metadata) -> SavedBuckets:
    """Read what a checkpoint says about its buckets."""
    boxes: dict[str, dict[tuple[int, ...], BucketBox]] = {}
    common: dict[str, dict[str, Any]] = {}
    there = metadata.state_dict_metadata
    for key in there:
        match = _GROUPS.fullmatch(key)
        # all model-parallel ranks have the same groups
        if match is not None and match["chain"] not in common:
            keys = {name: f"{match[1]}{name}{_SUFFIX}" for name in ("optimizer", "grad_scaler")}
            its = {name: key for name, key in keys.items() if key in there}
            common[match["chain"]] = {
                n: object_at(folder, metadata, key)[0] for n, key in its.items()
            }
        parts = split_key(key)
        if parts is None or parts.kind is not None or not parts.name.startswith("buffer_params."):
            continue
        (layout,) = object_at(folder, metadata, key)
        if not isinstance(layout, Mapping):
            continue  # written before boxes were saved
        prefix = next(p for p in layout["prefixes"] if f"{p}optimizer{_SUFFIX}" in there)
        for parameter, bucket, *box in layout["boxes"]:
            place = BucketBox(prefix + bucket, *box)
            # several model-parallel ranks may have a parameter
            boxes.setdefault(parameter, {}).setdefault((*place.offset, *place.shape), place)
    return SavedBuckets({key: list(its.values()) for key, its in boxes.items()}, [*common.values()])
