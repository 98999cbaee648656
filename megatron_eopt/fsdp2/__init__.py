"""The same optimizers for models that torch's ``fully_shard`` has sharded.

:func:`build_optimizer` takes the configuration that ``get_megatron_optimizer`` takes and returns an
ordinary ``torch.optim.Optimizer``. DTensor shards are one more storage layout; which rank computes
on which matrix, and how it travels there and back, is decided by the same code.
"""

from megatron_eopt.fsdp2.build import build_optimizer
from megatron_eopt.fsdp2.model import OUTPUT_LAYERS
from megatron_eopt.fsdp2.optimizer import ShardedOptimizer
from megatron_eopt.fsdp2.torch_muon import import_torch_muon

__all__ = ["OUTPUT_LAYERS", "ShardedOptimizer", "build_optimizer", "import_torch_muon"]
