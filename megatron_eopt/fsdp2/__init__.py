"""Optimizers for any PyTorch model and your own training loop, with or without FSDP2."""

from megatron_eopt.build.fsdp2 import build_optimizer, import_torch_muon
from megatron_eopt.optimizers.sharded import ShardedOptimizer
from megatron_eopt.routing.outputs import OUTPUT_LAYERS

__all__ = ["OUTPUT_LAYERS", "ShardedOptimizer", "build_optimizer", "import_torch_muon"]
