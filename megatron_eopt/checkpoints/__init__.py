"""Checkpoints: verified files, the newest whole one, matching state, and a checksum of the state.

For Megatron-LM's trainer :func:`trainer_rebindings` gives all of this; programs that call
``megatron.core.dist_checkpointing`` themselves use :func:`load` and :func:`save` instead.
"""

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoints.checksum import checksum
from megatron_eopt.checkpoints.folder import load, save
from megatron_eopt.checkpoints.trainer import trainer_rebindings

__all__ = ["CheckpointError", "checksum", "load", "save", "trainer_rebindings"]
