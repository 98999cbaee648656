"""Where optimizer state lives: fragments of Megatron's buffers, whole matrices while they step."""

from megatron_eopt.storage.layer_wise import LayerWiseDistributedOptimizer

__all__ = ["LayerWiseDistributedOptimizer"]
