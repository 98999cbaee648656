"""Optimizers for any PyTorch model and your own training loop, with or without FSDP2."""

from megatron_eopt.optimizers.dtensor_optimizer import ShardedOptimizer
from megatron_eopt.routing.outputs import OUTPUT_LAYERS
from megatron_eopt.wrappers.fsdp2 import build_optimizer, import_torch_muon

__all__ = ["OUTPUT_LAYERS", "ShardedOptimizer", "build_optimizer", "import_torch_muon"]
