"""The same optimizers for models that torch's ``fully_shard`` has sharded.

:func:`build_optimizer` takes the configuration that ``get_megatron_optimizer`` takes and returns an
ordinary ``torch.optim.Optimizer``. DTensor shards are one more storage; which rank computes on
which matrix, and how it travels there and back, is decided by the same code.
"""

from megatron_eopt.build.fsdp2 import OUTPUT_LAYERS, build_optimizer, import_torch_muon
from megatron_eopt.optimizers.sharded import ShardedOptimizer

__all__ = ["OUTPUT_LAYERS", "ShardedOptimizer", "build_optimizer", "import_torch_muon"]
