"""State in checkpoints: loaded at any layout, and into other optimizers."""

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.loading import load

__all__ = ["CheckpointError", "load"]
