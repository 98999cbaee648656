"""Optimizers for any PyTorch model and your own training loop, with or without FSDP2."""

from megatron_eopt.build.fsdp2 import OUTPUT_LAYERS, build_optimizer, import_torch_muon
from megatron_eopt.optimizers.sharded import ShardedOptimizer

__all__ = ["OUTPUT_LAYERS", "ShardedOptimizer", "build_optimizer", "import_torch_muon"]
