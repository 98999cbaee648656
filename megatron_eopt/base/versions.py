"""The one place that knows other packages' versions and private names.

megatron-core has no stable plug-in interface for optimizers, so a few of its private names are
used. They are listed here, looked up late (nothing is imported at import time) and reported by name
when a release has moved them.
"""

import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

_SUPPORTED = "megatron-core>=0.19.2,<0.20"

TESTED_MEGATRON = ("0.19.2",)
"""Releases whose own names may be replaced, see :mod:`megatron_eopt.megatron_lm`."""

_PLACES = {
    "DynamicGradScaler": "megatron.core.optimizer.grad_scaler",
    "ConstantGradScaler": "megatron.core.optimizer.grad_scaler",
    "HybridDeviceOptimizer": "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
    "MimoModel": "megatron.core.models.mimo.model.base",
    "get_global_unique_param_name": "megatron.core.transformer.fsdp_dtensor_checkpoint",
    "param_group_identifier_keys": "megatron.core.optimizer.optimizer",
    "Router": "megatron.core.transformer.moe.router",
    "VocabParallelEmbedding": "megatron.core.tensor_parallel",
}


@functools.cache
def megatron_name(name: str) -> Any:
    """Return one of megatron-core's undocumented names; an ImportError if it has it no longer."""
    module = importlib.import_module(_PLACES[name])
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise ImportError(
            f"megatron-core {megatron_version()} has no {_PLACES[name]}.{name}; "
            f"install '{_SUPPORTED}'"
        ) from error


def dataset_helpers_to_skip() -> ModuleType | None:
    """Return megatron-core's module whose ``compile_helpers`` cannot work, None if it can.

    The wheel brings the dataset helpers compiled, and no Makefile to compile them with.
    """
    module = importlib.import_module("megatron.core.datasets.utils")
    makefile = Path(module.__file__ or "").with_name("Makefile")
    return None if makefile.exists() else module


def megatron_version() -> str:
    """Return the release of the megatron-core that is imported, an installed one or a checkout."""
    version = importlib.import_module("megatron.core").__version__
    # it appends the commit of any repository that it happens to lie in
    return str(version).partition("+")[0]


def check_tested_megatron() -> None:
    """Raise an ImportError unless megatron-core is a release that this package was tested with."""
    found = megatron_version()
    if found not in TESTED_MEGATRON:
        raise ImportError(
            f"megatron-core {found} is not among the releases whose names megatron-eopt was "
            f"tested to replace ({', '.join(TESTED_MEGATRON)}); install one of these, or build "
            "the optimizer with megatron_eopt.get_megatron_optimizer in your own script"
        )


def check_megatron() -> None:
    """Raise an ImportError unless megatron-core is one that this package was written for."""
    found = megatron_version()
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not (0, 19, 2) <= numbers < (0, 20):
        raise ImportError(
            f"megatron-core {found} is installed, but megatron-eopt was written for "
            f"{_SUPPORTED}; install one of these"
        )
