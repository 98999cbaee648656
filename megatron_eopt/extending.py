"""Public names to add a storage, and the layer-wise distributed optimizer."""

from megatron_eopt.build.builders import Wanted, register_storage
from megatron_eopt.build.layer_wise import LayerWiseDistributedOptimizer
from megatron_eopt.build.replicated import chain_of_slabs
from megatron_eopt.storage.interface import Storage, Stored

__all__ = [
    "LayerWiseDistributedOptimizer",
    "Storage",
    "Stored",
    "Wanted",
    "chain_of_slabs",
    "register_storage",
]
