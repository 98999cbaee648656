"""Reads state that was saved by bucket, at any layout.

Megatron's Adam saves each bucket as a flat tensor of many parameters of one model-parallel rank.
This package saves beside it which box of which parameter is where in a bucket. A piece of a
parameter is put together from ranges of the buckets that hold a part of it.
"""

import functools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from megatron_eopt.checkpoint.files import object_at
from megatron_eopt.checkpoint.keys import split_key

BY_BUCKET = "dp_reshardable"
"""Megatron's name for this form of state."""

type Box = tuple[str, str, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
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


def put_together(
    piece: ShardedTensor,
    kind: str,
    boxes: Sequence[BucketBox],
    shapes: Mapping[str, tuple[int, ...] | None],
) -> ShardedTensorFactory | None:
    """Return what reads a piece of a parameter from buckets; None if they lack a part of it.

    Args:
        piece: The piece, whose data is written to.
        kind: The kind of state to read.
        boxes: The boxes of the parameter.
        shapes: Shapes of the checkpoint's tensors.
    """
    parts: dict[str, tuple[ShardedTensor, BucketBox]] = {}
    stop = tuple(map(operator.add, piece.global_offset, piece.local_shape))
    for box in boxes:
        low = tuple(map(max, piece.global_offset, box.offset))
        high = tuple(map(min, stop, map(operator.add, box.offset, box.shape)))
        shape = tuple(map(operator.sub, high, low))
        size = shapes.get(key := f"{box.bucket}.{kind}")
        if min(shape, default=1) <= 0 or size is None:
            continue
        first = box.first + math.sumprod(map(operator.sub, low, box.offset), box.strides)
        length = 1 + math.sumprod((n - 1 for n in shape), box.strides)
        read = ShardedTensor(key, None, piece.dtype, (length,), size, (first,), None)
        offset = tuple(map(operator.sub, low, piece.global_offset))
        parts[str(len(parts))] = read, box._replace(shape=shape, offset=offset)
    if sum(math.prod(box.shape) for _, box in parts.values()) != piece.data.numel():
        return None
    reads = {name: read for name, (read, _) in parts.items()}
    build = functools.partial(_with_memory, reads, piece.data)
    merge = functools.partial(_merged, piece.data, {n: box for n, (_, box) in parts.items()})
    return ShardedTensorFactory(piece.key, piece.data, build, merge, piece.replica_id)


def _with_memory(
    reads: Mapping[str, ShardedTensor], like: Tensor, *_: Any
) -> dict[str, ShardedTensor]:
    for read in reads.values():
        read.data = like.new_empty(read.local_shape)
    return dict(reads)


def _merged(target: Tensor, boxes: Mapping[str, BucketBox], loaded: Mapping[str, Tensor]) -> Tensor:
    for name, (_, _, strides, shape, offset) in boxes.items():
        where = tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))
        target[where].copy_(loaded[name].as_strided(shape, strides))
    return target
