"""What distributed checkpoints hold, to compare the states of two runs."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.state.groups import saved_steps

COMMON = "common_state/shard_0_1"
"""Key of what all ranks save together: steps of optimizers among it."""


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, whole."""
    found = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    checkpoint.load(found, checkpoint_id=folder, no_dist=True)
    return found


def by_kind(state: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Return an optimizer's tensors by kind and parameter; storages call main weights differently.

    Of matrices that are parts of one parameter, one is returned.
    """
    return {
        (parts.kind.removeprefix("fp32_"), parts.name): state[key]
        for key in state
        if (parts := split_key(key)) and parts.kind
    }


def objects_in(folder: Path) -> dict[str, Any]:
    """Return what optimizers save besides tensors: steps, and numbers of matrices."""
    metadata = FileSystemReader(folder).read_metadata()
    found = {}
    for key, item in metadata.state_dict_metadata.items():
        is_optimizers = key == COMMON or split_key(key) is not None
        if isinstance(item, TensorStorageMetadata) or not is_optimizers:
            continue
        at = metadata.storage_data[MetadataIndex(key)]
        with (folder / at.relative_path).open("rb") as file:
            file.seek(at.offset)
            content = torch.load(io.BytesIO(file.read(at.length)), weights_only=True)
        if key == COMMON:
            content = saved_steps(content[0].get("optimizer", {}))
        found[key] = content
    return found


def differing(first: Path, second: Path) -> list[str]:
    """Return the keys of the weights and the optimizer state in which two checkpoints differ."""
    ours, theirs = tensors_in(first), tensors_in(second)
    other = ours.keys() ^ theirs.keys()
    other |= {key for key in ours.keys() & theirs.keys() if not _same(ours[key], theirs[key])}
    texts, others = ({(k, repr(v)) for k, v in objects_in(it).items()} for it in (first, second))
    other |= {key for key, _ in texts ^ others}
    return sorted(other)


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether all bits are the same."""
    bits, others = (tensor.reshape(-1).view(torch.uint8) for tensor in (first, second))
    return (first.dtype, first.shape) == (second.dtype, second.shape) and torch.equal(bits, others)
