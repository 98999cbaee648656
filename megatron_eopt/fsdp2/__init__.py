"""Optimizers for any PyTorch model and your own training loop, with or without FSDP2.

``build`` routes a model's parameters and builds :class:`DTensorOptimizer`, which ``optimizer``
defines; ``dtensors`` finds out which ranks store which shards. Megatron-core is not needed.
"""

from megatron_eopt.base.quiet import importing_quietly

with importing_quietly():
    from megatron_eopt.config.config import TorchOptimizerConfig
    from megatron_eopt.config.keys import ParamKey, get_standard_config_overrides
    from megatron_eopt.fsdp2.build import build_optimizer
    from megatron_eopt.fsdp2.optimizer import DTensorOptimizer
    from megatron_eopt.routing.outputs import OUTPUT_LAYERS

__all__ = [
    "OUTPUT_LAYERS",
    "DTensorOptimizer",
    "ParamKey",
    "TorchOptimizerConfig",
    "build_optimizer",
    "get_standard_config_overrides",
]
