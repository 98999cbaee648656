"""The layer-wise distributed optimizer under its public name."""

from megatron_eopt.build.layer_wise import LayerWiseDistributedOptimizer

__all__ = ["LayerWiseDistributedOptimizer"]
