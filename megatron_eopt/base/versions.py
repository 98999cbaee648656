"""The one place that knows other packages' versions and private names.

megatron-core has no stable plug-in interface for optimizers, so a few of its private names are
used. They are listed here, looked up late (nothing is imported at import time) and reported by name
when a release has moved them.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from typing import Any

from megatron_eopt.base.errors import ConfigurationError

SUPPORTED_MEGATRON = ((0, 19, 2), (0, 20))
"""First supported release of megatron-core and the first one that is not."""

_INSTALL = {
    "apex": "pip install -v --no-build-isolation git+https://github.com/NVIDIA/apex",
    "transformer_engine": "pip install 'transformer-engine[pytorch]'",
    "emerging_optimizers": "pip install 'emerging-optimizers>=0.3,<0.4'",
    "gram_newton_schulz": "pip install gram-newton-schulz",
}

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
    """Return one of megatron-core's names that are not part of its documented interface.

    Raises:
        ImportError: If the installed release has it no longer.
    """
    module = importlib.import_module(_PLACES[name])
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise ImportError(
            f"megatron-core {version_of('megatron-core')} has no {_PLACES[name]}.{name}; "
            "install 'megatron-core>=0.19.2,<0.20'"
        ) from error


def version_of(distribution: str) -> str:
    """Return the installed version of a distribution, or "none"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def is_installed(package: str) -> bool:
    """Whether ``package`` (an import name) can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def require(package: str, argument: str, value: object) -> None:
    """Raise unless ``package`` is installed.

    Args:
        package: Import name.
        argument: The option that needs it.
        value: That option's value.

    Raises:
        ConfigurationError: If it is missing; the message has the command that installs it.
    """
    if not is_installed(package):
        command = _INSTALL.get(package, f"pip install {package.replace('_', '-')}")
        raise ConfigurationError(
            argument, value, f"needs the package {package}, which is not installed", command
        )


def check_megatron() -> None:
    """Raise unless the installed megatron-core is one this package was written for.

    Raises:
        ImportError: If it is not.
    """
    found = version_of("megatron-core")
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    first, end = SUPPORTED_MEGATRON
    if not first <= numbers < end:
        raise ImportError(
            f"megatron-core {found} is installed, but megatron-eopt was written for "
            "megatron-core>=0.19.2,<0.20; install one of these"
        )
