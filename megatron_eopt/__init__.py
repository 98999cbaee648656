"""Muon and similar optimizers for Megatron-Core trainers.

Public names are imported on first use. So ``import megatron_eopt`` is cheap and works before or
after megatron-core is imported.
"""

import importlib
from typing import Any

from megatron_eopt.base.quiet import importing_quietly

_PLACES = {
    "AdamOptimizerConfig": "config.config",
    "ConfigurationError": "base.errors",
    "ConfigurationTypeError": "base.errors",
    "EmergingOptimizerConfig": "config.config",
    "EmergingOptimizerEntry": "config.registry",
    "OptimizerConfig": "config.config",
    "SGDOptimizerConfig": "config.config",
    "TensorParallelAdaptiveMuon": "optimizers.adaptive_muon",
    "TensorParallelMuon": "optimizers.muon",
    "get_megatron_optimizer": "wrappers.factory",
    "load_optimizer_config": "optimizers.built_in",
    "register_optimizer": "optimizers.built_in",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with importing_quietly():
        value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    # found without this function the next time
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
