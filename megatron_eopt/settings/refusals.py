"""Modes of megatron-core that an optimizer cannot work with."""

from typing import Any

import torch

from megatron_eopt.base import gpu
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STANDARD_OPTIMIZERS

_ONLY_FOR = {
    "use_precision_aware_optimizer": (("adam",), "works with adam only, not with"),
    "optimizer_cuda_graph": (("adam",), "works with adam only, not with"),
    "overlap_param_gather_with_optimizer_step": (STANDARD_OPTIMIZERS, "does not work with"),
}
_DTYPES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def refuse_unsupported_modes(config: Any, name: str) -> None:
    """Raise a ConfigurationError for the first mode that the optimizer ``name`` cannot do."""
    precision_aware = config.use_precision_aware_optimizer
    if precision_aware and not config.use_distributed_optimizer and name == "adam":
        _refuse("use_precision_aware_optimizer", "needs use_distributed_optimizer=True")
    for field in () if precision_aware else _DTYPES:
        if (value := getattr(config, field)) != torch.float32:
            rule = "must be torch.float32 without use_precision_aware_optimizer"
            way_out = "Leave it out, or train with adam and use_precision_aware_optimizer=True"
            raise ConfigurationError(field, value, rule, way_out)
    for field, (optimizers, rule) in _ONLY_FOR.items():
        if getattr(config, field) and name not in optimizers:
            _refuse(field, f"{rule} {name}")
    if config.optimizer_cuda_graph and config.optimizer_cpu_offload:
        _refuse("optimizer_cpu_offload", "copies to the host, which no CUDA graph can hold")
    if config.optimizer_cuda_graph and not gpu.is_there():
        _refuse("optimizer_cuda_graph", "needs a GPU")


def _refuse(argument: str, rule: str) -> None:
    raise ConfigurationError(argument, True, rule, f"Leave {argument} off, or change the optimizer")
