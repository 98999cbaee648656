"""What the layer-wise storage cannot serve, each refused with one sentence when it is built."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError

__all__ = ["check_base_optimizers", "check_buffers", "check_config", "check_model_chunks"]

_CONFIG_REFUSALS = {
    "use_precision_aware_optimizer": "keeps main parameters inside Transformer Engine's Adam, "
    "where matrices cannot be redistributed from",
    "optimizer_cpu_offload": "moves optimizer states to the CPU, and matrices are redistributed "
    "between devices",
    "reuse_grad_buf_for_mxfp8_param_ag": "overwrites gradients before all optimizers have stepped",
    "optimizer_cuda_graph": "cannot capture the collectives that bring matrices together",
    "overlap_param_gather_with_optimizer_step": "gathers parameters before all have been stepped",
}

_DDP_REFUSALS = {
    "use_megatron_fsdp": "has no flat buffers to take fragments from",
    "reuse_grad_buf_for_mxfp8_param_ag": "overwrites gradients before all optimizers have stepped",
}


def check_config(config: Any) -> None:
    """Raise for the first mode of an ``OptimizerConfig`` that cannot be honoured.

    Raises:
        ConfigurationError: If there is one.
    """
    for name, reason in _CONFIG_REFUSALS.items():
        if getattr(config, name, False):
            raise ConfigurationError(
                name, True, f"{reason}, so layer-wise storage refuses it", f"Set {name}=False"
            )


def check_model_chunks(model_chunks: Any) -> None:
    """Raise unless the model is wrapped in Megatron's DDP in a mode that can be served.

    Raises:
        ConfigurationTypeError: If it is not wrapped.
        ConfigurationError: If it is wrapped in another mode.
    """
    if not model_chunks:
        raise ConfigurationTypeError(
            "model_chunks",
            model_chunks,
            "must be the list of wrapped model chunks, whose buffers hold the fragments",
            "Wrap the model in megatron.core.distributed.DistributedDataParallel and pass it",
        )
    for chunk in model_chunks:
        ddp_config = getattr(chunk, "ddp_config", None)
        if ddp_config is None or not hasattr(chunk, "buffers") or callable(chunk.buffers):
            raise ConfigurationTypeError(
                "model_chunks",
                chunk,
                "must be wrapped in megatron.core.distributed.DistributedDataParallel",
                "Wrap it, with use_distributed_optimizer=True",
            )
        _check_ddp(ddp_config)
        if getattr(chunk.config, "qk_clip", False):
            raise ConfigurationError(
                "qk_clip",
                True,
                "writes whole weights through main_param, which here is one rank's fragment",
                "Set qk_clip=False",
            )


def _check_ddp(ddp_config: Any) -> None:
    for name, reason in _DDP_REFUSALS.items():
        if getattr(ddp_config, name, False):
            raise ConfigurationError(
                f"DistributedDataParallelConfig.{name}",
                True,
                f"{reason}, so layer-wise storage refuses it",
                f"Set {name}=False",
            )
    if ddp_config.use_distributed_optimizer:
        return
    for name in ("overlap_param_gather", "fp8_param_gather", "fp4_param_gather"):
        if getattr(ddp_config, name, False):
            raise ConfigurationError(
                f"DistributedDataParallelConfig.{name}",
                True,
                "needs parameters in flat buffers, and this DDP all-reduces gradients of "
                "parameters that lie apart",
                "Set use_distributed_optimizer=True in the same configuration",
            )
    if ddp_config.num_distributed_optimizer_instances > 1:
        raise ConfigurationError(
            "DistributedDataParallelConfig.num_distributed_optimizer_instances",
            ddp_config.num_distributed_optimizer_instances,
            "needs a DDP that reduce-scatters gradients",
            "Set use_distributed_optimizer=True in the same configuration",
        )


def check_base_optimizers(optimizers: Sequence[Any]) -> None:
    """Raise unless all are torch optimizers that nobody has wrapped and that step without closure.

    Raises:
        ConfigurationTypeError: For one that is wrapped already, or is no optimizer.
        ConfigurationError: For one that needs a closure.
    """
    for number, optimizer in enumerate(optimizers):
        argument = f"optimizers[{number}]"
        if isinstance(optimizer, MegatronOptimizer):
            raise ConfigurationTypeError(
                argument,
                optimizer,
                "is wrapped already, and layer-wise storage wraps base torch optimizers itself",
                "Pass the torch optimizer inside it",
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationTypeError(
                argument, optimizer, "must be a torch.optim.Optimizer", "Pass one"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigurationError(
                argument,
                type(optimizer).__name__,
                "needs a closure that evaluates the model again, which Megatron's training step "
                "does not give",
                "Choose an optimizer whose step() works without one",
            )


def check_buffers(
    buffers: Iterable[Any], groups: Iterable[dict[str, Any]], names: dict[torch.Tensor, str]
) -> None:
    """Raise unless every parameter of the buffers is in exactly one group, in one data type.

    Args:
        buffers: DDP's flat buffers.
        groups: Parameter groups of all base optimizers.
        names: Names of the parameters.

    Raises:
        ConfigurationError: If one is in none or in several, or a buffer mixes data types.
    """
    owners: dict[torch.Tensor, int] = {}
    for group in groups:
        for param in group["params"]:
            owners[param] = owners.get(param, 0) + 1
    for buffer in buffers:
        for param in buffer.params:
            count = owners.get(param, 0)
            if count != 1:
                raise ConfigurationError(
                    "optimizers",
                    names[param],
                    f"must be in exactly one parameter group, and is in {count}",
                    "Give every trainable parameter to one optimizer, or freeze it before the "
                    "model is wrapped",
                )
            wanted = buffer.param_dtype  # of quantized weights their bytes
            if wanted.is_floating_point and param.dtype != wanted:
                raise ConfigurationError(
                    "model_chunks",
                    names[param],
                    f"is {param.dtype} in a buffer of {wanted}, and a buffer is "
                    "gathered in one data type",
                    "Convert the model before it is wrapped",
                )
