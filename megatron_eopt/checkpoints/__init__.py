"""State in checkpoints: matched with what a run asks for, loaded anywhere, and its checksum.

What is about the files that hold it is in :mod:`megatron_eopt.checkpoint_files`.
"""

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoints.checksum import checksum
from megatron_eopt.checkpoints.loading import load
from megatron_eopt.checkpoints.trainer import checksum_rebindings, trainer_rebindings

__all__ = ["CheckpointError", "checksum", "checksum_rebindings", "load", "trainer_rebindings"]
