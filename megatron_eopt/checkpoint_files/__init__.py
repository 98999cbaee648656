"""Files of checkpoints: verified by a manifest, the newest whole folder found, read as data only.

A package of its own: no optimizer knows it, and who installs our optimizers into Megatron-LM's
trainer gets it with ``--verify-checkpoints`` alone (:func:`trainer_rebindings`). Programs that call
``megatron.core.dist_checkpointing`` themselves use :func:`save` and :func:`load` instead.
"""

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint_files.checksum_lines import checksum_rebindings
from megatron_eopt.checkpoint_files.folder import load, save
from megatron_eopt.checkpoint_files.trainer import trainer_rebindings

__all__ = ["CheckpointError", "checksum_rebindings", "load", "save", "trainer_rebindings"]
