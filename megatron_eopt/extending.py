"""Public names to add a storage, and the layer-wise distributed optimizer."""

from megatron_eopt.storage.interface import Storage, Stored
from megatron_eopt.wrappers.builders import Wanted, register_storage
from megatron_eopt.wrappers.layer_wise import LayerWiseDistributedOptimizer
from megatron_eopt.wrappers.replicated import chain_of_slabs

__all__ = [
    "LayerWiseDistributedOptimizer",
    "Storage",
    "Stored",
    "Wanted",
    "chain_of_slabs",
    "register_storage",
]
