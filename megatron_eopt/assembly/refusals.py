"""Modes of megatron-core that an optimizer cannot work with."""

from typing import Any

import torch

from megatron_eopt import cpu
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STANDARD_OPTIMIZERS

_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def refuse_unsupported_modes(config: Any, name: str) -> None:
    """Raise if ``config`` turns on something that the optimizer ``name`` cannot do.

    Raises:
        ConfigurationError: For the first such field.
    """
    if config.use_precision_aware_optimizer:
        if name != "adam":
            _refuse("use_precision_aware_optimizer", f"works with adam only, not with {name}")
        if not config.use_distributed_optimizer:
            _refuse("use_precision_aware_optimizer", "needs use_distributed_optimizer=True")
    else:
        _refuse_dtypes(config)
    if config.optimizer_cpu_offload and name not in STANDARD_OPTIMIZERS:
        _refuse("optimizer_cpu_offload", f"works with adam and sgd only, not with {name}")
    if config.optimizer_cuda_graph and name != "adam":
        _refuse("optimizer_cuda_graph", f"works with adam only, not with {name}")
    if config.optimizer_cuda_graph and cpu.is_enabled():
        _refuse("optimizer_cuda_graph", "needs a GPU")
    if config.overlap_param_gather_with_optimizer_step and name not in STANDARD_OPTIMIZERS:
        _refuse("overlap_param_gather_with_optimizer_step", f"does not work with {name}")


def _refuse_dtypes(config: Any) -> None:
    for field in _DTYPES:
        value = getattr(config, field)
        if value != torch.float32:
            raise ConfigurationError(
                field,
                value,
                "must be torch.float32 without use_precision_aware_optimizer",
                "Leave it out, or train with adam and use_precision_aware_optimizer=True",
            )


def _refuse(argument: str, rule: str) -> None:
    raise ConfigurationError(argument, True, rule, f"Leave {argument} off, or change the optimizer")
