"""Muon and similar optimizers for Megatron-Core trainers.

Public names are imported on first use. So ``import megatron_eopt`` is cheap and works before or
after megatron-core is imported.
"""

import importlib
from typing import Any

from megatron_eopt.base.quiet import importing_quietly

_PLACES = {
    "AdamOptimizerConfig": "wrappers.config",
    "ConfigurationError": "base.errors",
    "ConfigurationTypeError": "base.errors",
    "EmergingOptimizerConfig": "wrappers.config",
    "EmergingOptimizerEntry": "config.registry",
    "OptimizerConfig": "wrappers.config",
    "SGDOptimizerConfig": "wrappers.config",
    "TensorParallelAdaptiveMuon": "optimizers.adaptive_muon",
    "TensorParallelMuon": "optimizers.muon",
    "TorchOptimizerConfig": "config.config",
    "build_optimizer": "fsdp2.build",
    "get_megatron_optimizer": "wrappers.factory",
    "load_optimizer_config": "wrappers.config_file",
    "register_optimizer": "optimizers.built_in",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        with importing_quietly():
            value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "megatron":
            raise
        text = "needs megatron-core. Your own training loop can use TorchOptimizerConfig and"
        raise ImportError(f"{__name__}.{name} {text} build_optimizer without it") from error
    # found without this function the next time
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
