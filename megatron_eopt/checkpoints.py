"""State in checkpoints: loaded at any layout, in any form that is registered."""

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.loading import load
from megatron_eopt.checkpoint.saved_state import Source, Value, register_form

__all__ = ["CheckpointError", "Source", "Value", "load", "register_form"]
