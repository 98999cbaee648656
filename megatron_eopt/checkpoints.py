"""State in checkpoints: loaded at any layout, and its checksum."""

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.loading import load
from megatron_eopt.checkpoint_files.checksum import checksum

__all__ = ["CheckpointError", "checksum", "load"]
