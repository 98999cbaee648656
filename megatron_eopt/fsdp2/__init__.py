"""Optimizers for any PyTorch model and your own training loop, with or without FSDP2.

These are public names alone; whoever changes what they do reads ``wrappers`` and ``checkpoint``.
"""

from megatron_eopt.base.quiet import importing_quietly

with importing_quietly():
    from megatron.core.optimizer import ParamKey, get_standard_config_overrides

    from megatron_eopt.checkpoint.dtensor_optimizer import DTensorOptimizer
    from megatron_eopt.routing.outputs import OUTPUT_LAYERS
    from megatron_eopt.wrappers.fsdp2 import build_optimizer

__all__ = [
    "OUTPUT_LAYERS",
    "DTensorOptimizer",
    "ParamKey",
    "build_optimizer",
    "get_standard_config_overrides",
]
