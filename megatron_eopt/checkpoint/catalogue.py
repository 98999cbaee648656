"""What a checkpoint has, read once from its metadata.

:func:`read_catalogue` reads ``torch_dist`` and what torch writes itself (``fsdp_dtensor`` and
``torch_dcp``), and of format ``torch`` the groups. No tensor is read. torch unpickles metadata
unchecked, so a checkpoint must be trusted.
"""

import re
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

from megatron_eopt.checkpoint.common_state import read_common_state
from megatron_eopt.checkpoint.keys import Saved, split_key
from megatron_eopt.guard.contents import (
    RANK_FILE,
    form_of,
    object_at,
    read_metadata,
    read_rank_file,
)
from megatron_eopt.routing.groups import GROUP_ID
from megatron_eopt.state.groups import BY_PARAMETER, PARAM_NAMES, Groups, groups_in
from megatron_eopt.state.rule import MEANINGS, Kinds, SavedState, Writer, optimizer_of

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
    # groups and loss scale of each optimizer of the chain that are saved with its buckets
    bucket_common: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def shapes(self) -> Shapes:
        """Shapes by key."""
        return {key: value.shape for key, value in self.values.items()}

    @cached_property
    def groups(self) -> Groups:
        """Parameter groups that are saved once for all parameters, each with its optimizer."""
        groups = [*groups_in(self.common), *groups_in(self.bucket_common)]
        # megatron-core does not name its main optimizer there
        main = getattr(self.common.get("args"), "optimizer", None)
        return [g if main is None or optimizer_of(g) else {**g, "optimizer": main} for g in groups]

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
    def _full_keys(self) -> Mapping[str, str]:
        # two optimizers of a chain have no parameter in common, so nothing is lost
        return {key.removeprefix(value.chain): key for key, value in self.values.items()}

    def full_key(self, key: str) -> str | None:
        """Return a key with the index in a chain, if the checkpoint has it."""
        return self._full_keys.get(key)

    def tensor_keys(self, key: str) -> list[str]:
        """Return the full key of a tensor, if the checkpoint has it."""
        full = self._full_keys.get(key, "")
        return [full] if self.shapes.get(full) is not None else []

    @cached_property
    def _group_of(self) -> Mapping[str, Mapping[str, Any]]:
        return {name: group for group in self.groups for name in group.get(PARAM_NAMES, ())}

    def state_of(
        self, names: tuple[str, str], kinds: frozenset[str], own: Kinds, *, is_matrix: bool
    ) -> SavedState:
        """Return what the checkpoint has of a parameter, with who may have written it.

        Args:
            names: The parameter's name, and that of its stack of layers or experts.
            kinds: Kinds of its saved state.
            own: Kinds of state of this run's optimizers.
            is_matrix: Whether megatron-core gives the parameter to its main optimizer.
        """
        if self._group_of:
            name, stack = names
            # a group has a stack's name if it had any of its layers, and maybe not this one
            group = self._group_of.get(name) or (self._group_of.get(stack) if kinds else None)
            return SavedState(kinds, () if group is None else (Writer.of(group),))
        if not kinds:
            return SavedState()
        # megatron-core and NeMo name no parameters
        mains = [optimizer_of(group) != "adam" for group in self.groups]
        usual = [g for g, main in zip(self.groups, mains, strict=True) if main == is_matrix]
        every = SavedState(kinds, tuple(dict.fromkeys(map(Writer.of, self.groups)))).by(own)
        likely = {*map(Writer.of, usual)}.intersection(every.writers)
        return every._replace(writers=tuple(likely)) if likely else every


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
    return Catalogue("torch_dist", values, common, {}, _common_of_buckets(folder, metadata))


_GROUPS = re.compile(
    r"(?P<optimizer>(?P<chain>(?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_\d+\.)"
    r"optimizer/shard_0_1"
)
"""The key of the groups that are saved beside the buckets of a model-parallel rank."""


def _common_of_buckets(folder: Path, metadata: Metadata) -> list[dict[str, Any]]:
    """Return groups and loss scale of each optimizer that are saved beside its buckets."""
    common: dict[str, dict[str, Any]] = {}
    saved = metadata.state_dict_metadata
    for match in filter(None, map(_GROUPS.fullmatch, saved)):
        # all model-parallel ranks have the same groups
        if match["chain"] not in common:
            names = ("optimizer", "grad_scaler")
            keys = {name: f"{match['optimizer']}{name}/shard_0_1" for name in names}
            common[match["chain"]] = {
                n: object_at(folder, metadata, key)[0] for n, key in keys.items() if key in saved
            }
    return [*common.values()]


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


_TOLD = (GROUP_ID, "optimizer", *MEANINGS)
"""Settings of groups that tell what their parameters' state means."""


def _sizes(item: Any) -> tuple[tuple[int, ...] | None, torch.dtype | None, tuple[int, ...]]:
    """Return shape, number type and cuts of a tensor; of an object there are none."""
    if not isinstance(item, TensorStorageMetadata):
        return None, None, ()
    cuts = (len(set(offsets)) for offsets in zip(*(c.offsets for c in item.chunks), strict=True))
    return tuple(item.size), item.properties.dtype, tuple(cuts)
