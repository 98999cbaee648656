"""What a checkpoint has, read once from its metadata.

:func:`read_catalogue` reads ``torch_dist`` and what torch writes itself (``fsdp_dtensor`` and
``torch_dcp``), and of format ``torch`` the groups. No tensor is read. torch unpickles metadata
unchecked, so a checkpoint must be trusted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_eopt.checkpoint.buckets import BucketBoxes, read_buckets
from megatron_eopt.checkpoint.files import (
    RANK_FILE,
    form_of,
    object_at,
    read_common_state,
    read_metadata,
    read_rank_file,
)
from megatron_eopt.checkpoint.keys import BUCKET_PARAMS, Saved, split_key
from megatron_eopt.checkpoint.saved_groups import BY_PARAMETER, Groups, groups_in
from megatron_eopt.config.writers import TOLD
from megatron_eopt.routing.groups import GROUP_ID

type Shapes = Mapping[str, tuple[int, ...] | None]
"""Global shapes of a checkpoint's tensors by key; None for objects."""


@dataclass(frozen=True)
class Catalogue:
    """What a checkpoint has; all ranks can share it."""

    form: str  # "torch_dist", "fsdp_dtensor", "torch_dcp", or "torch": a rank's file
    values: Mapping[str, Saved]  # by key
    common: Mapping[str, Any] = field(default_factory=dict)  # arguments, groups and the like
    # settings of groups by parameter, in ``fsdp_dtensor``
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bucket_boxes: BucketBoxes = field(default_factory=dict)  # where parameters are in buckets
    # groups and loss scale of each optimizer of the chain that are saved with its buckets
    bucket_common: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def shapes(self) -> Shapes:
        """Shapes by key."""
        return {key: value.shape for key, value in self.values.items()}

    @cached_property
    def groups(self) -> Groups:
        """Parameter groups that are saved once for all parameters."""
        return groups_in(self.common)

    @cached_property
    def state(self) -> Mapping[str, Mapping[str, Saved]]:
        """State by the name of the parameter, and kind."""
        by_name: dict[str, dict[str, Saved]] = {}
        for value in self.values.values():
            if value.kind is not None and not value.in_bucket:
                by_name.setdefault(value.name, {})[value.kind] = value
        return by_name

    @cached_property
    def in_buckets(self) -> frozenset[str]:
        """Kinds of state in buckets of many parameters."""
        return frozenset(v.kind for v in self.values.values() if v.in_bucket and v.kind)

    @cached_property
    def bucket_names(self) -> frozenset[str]:
        """Names of objects that identify the parameters in buckets."""
        return frozenset(v.name for v in self.values.values() if v.name.startswith(BUCKET_PARAMS))


def read_catalogue(folder: Path) -> Catalogue:
    """Read what a checkpoint has.

    Raises:
        CheckpointError: If it cannot be read.
    """
    if form_of(folder) == "torch":
        # the first rank's; others have the same groups
        path = min(folder.glob("mp_rank_*")) / RANK_FILE
        return Catalogue("torch", {}, read_rank_file(path))
    metadata = read_metadata(folder)
    # torch notes how to nest the keys, megatron-core does not
    if metadata.planner_data:
        return _of_torch(folder, metadata)
    values = {key: by_key(key, *_sizes(item)) for key, item in metadata.state_dict_metadata.items()}
    common = read_common_state(folder)
    return Catalogue("torch_dist", values, common, {}, *read_buckets(folder, metadata))


def by_key(
    key: str,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype | None = None,
    cuts: tuple[int, ...] = (),
) -> Saved:
    """Return a value of ``torch_dist``, or of a rank's file; see Note [Keys]."""
    value = (split_key(key) or Saved(None, key))._replace(shape=shape, dtype=dtype, cuts=cuts)
    if ".bucket_idx_" not in value.name:
        return value
    return value._replace(kind=value.kind or value.name.rpartition(".")[2], in_bucket=True)


def _of_torch(folder: Path, metadata: Metadata) -> Catalogue:
    """Return what torch's own format has, by the paths of nested state."""
    values: dict[str, Saved] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, path in metadata.planner_data.items():
        words = tuple(map(str, path))
        item = metadata.state_dict_metadata.get(key)
        is_state = "state" in words[:-2]
        name = words[-2] if is_state else key
        values[key] = Saved(words[-1] if is_state else None, name, *_sizes(item))
        if BY_PARAMETER in words[:-2]:
            # only these values matter before a load
            value = object_at(folder, metadata, key) if words[-1] in _TOLD else None
            settings.setdefault(words[-2], {})[words[-1]] = value
    common = {
        key: object_at(folder, metadata, key)
        for key in ("args", "iteration")
        if MetadataIndex(key) in metadata.storage_data
    }
    usual = "fsdp_dtensor" if settings else "torch_dcp"
    form = getattr(common.get("args"), "ckpt_format", usual)
    return Catalogue(form, values, common, settings)


_TOLD = (GROUP_ID, "optimizer", *TOLD)
"""Settings of groups that tell what their parameters' state means."""


def _sizes(item: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None, tuple[int, ...]]:
    """Return shape, number type and cuts of a tensor; of an object there are none."""
    if not isinstance(item, TensorStorageMetadata):
        return None, None, ()
    cuts = (len(set(offsets)) for offsets in zip(*(c.offsets for c in item.chunks), strict=True))
    return tuple(item.size), item.properties.dtype, tuple(cuts)
