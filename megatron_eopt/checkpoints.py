"""State in checkpoints: loaded at any layout, in any form that is registered, and its checksum."""

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.loading import load
from megatron_eopt.checkpoint.saved_state import Source, Value, register_form
from megatron_eopt.checkpoint_files.checksum import checksum

__all__ = ["CheckpointError", "Source", "Value", "checksum", "load", "register_form"]
