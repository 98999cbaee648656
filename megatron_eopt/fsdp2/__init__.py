"""The optimizers for any PyTorch model, with or without torch's ``fully_shard``.

:func:`build_optimizer` takes the configuration of ``get_megatron_optimizer`` and returns a
``torch.optim.Optimizer`` for your own training loop.
"""

from megatron_eopt.build.fsdp2 import OUTPUT_LAYERS, build_optimizer, import_torch_muon
from megatron_eopt.optimizers.sharded import ShardedOptimizer

__all__ = ["OUTPUT_LAYERS", "ShardedOptimizer", "build_optimizer", "import_torch_muon"]
