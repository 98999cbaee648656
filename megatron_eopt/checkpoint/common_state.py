"""Reads what all ranks of a ``torch_dist`` checkpoint share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import load_common_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_eopt.guard.contents import METADATA, damaged, object_at, read_metadata, text_of

_COMMON_STATE = "common_state/shard_0_1"
"""megatron-core's key of it."""


def read_common_state(folder: Path) -> Mapping[str, Any]:
    """Return the state that all ranks of a ``torch_dist`` checkpoint share.

    Raises:
        CheckpointError: If it cannot be read.
    """
    if (folder / METADATA).exists():
        metadata = read_metadata(folder)
        if MetadataIndex(_COMMON_STATE) in metadata.storage_data:
            (common,) = object_at(folder, metadata, _COMMON_STATE)
            return common  # type: ignore[no-any-return]
    try:
        # a file beside it, as older versions wrote
        return load_common_state_dict(folder)  # type: ignore[no-any-return]
    # torch's own error is no Exception
    except (Exception, CheckpointException) as error:
        raise damaged(folder, f"its common state cannot be read ({text_of(error)})") from error
