"""Whether a model is wrapped in the way that an optimizer needs."""

from collections.abc import Sequence
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.settings.settings import Settings


def is_megatron_fsdp(model_chunks: Sequence[Any]) -> bool:
    """Whether Megatron's own FSDP manages the model."""
    ddp_config = getattr(model_chunks[0], "ddp_config", None)
    return bool(getattr(ddp_config, "use_megatron_fsdp", False))


def check_ddp(settings: Settings, model_chunks: Sequence[Any]) -> None:
    """Raise if the wrapped model reduces gradients in a way that the optimizer does not expect.

    Raises:
        ConfigurationError: If training would go wrong; the message says which flag to change.
    """
    for chunk in model_chunks:
        ddp_config = getattr(chunk, "ddp_config", None)
        if ddp_config is None:
            continue
        _check_qk_clip(settings, chunk)
        scattered = ddp_config.use_distributed_optimizer
        is_sharded = settings.storage == "sharded"
        if scattered and not is_sharded:
            raise ConfigurationError(
                "DistributedDataParallelConfig.use_distributed_optimizer",
                True,
                "each rank would get only its own part of the gradients, but the optimizer is "
                f"configured to hold all of {settings.optimizer}'s state on every rank",
                "Set it to False, or set use_distributed_optimizer=True in the optimizer's config",
            )
        if is_sharded and not scattered and settings.is_standard:
            raise ConfigurationError(
                "use_distributed_optimizer",
                True,
                "the model was wrapped without it",
                "Set DistributedDataParallelConfig.use_distributed_optimizer=True too",
            )
        if ddp_config.overlap_param_gather and not is_sharded:
            raise ConfigurationError(
                "DistributedDataParallelConfig.overlap_param_gather",
                True,
                "there is nothing to gather without a distributed optimizer",
                "Set it to False, or use_distributed_optimizer=True",
            )
        if settings.early_gather and not ddp_config.overlap_param_gather:
            raise ConfigurationError(
                "overlap_param_gather_with_optimizer_step",
                True,
                "needs overlap_param_gather",
                "Set DistributedDataParallelConfig.overlap_param_gather=True too",
            )
        if getattr(ddp_config, "use_megatron_fsdp", False) and not settings.is_standard:
            raise ConfigurationError(
                "DistributedDataParallelConfig.use_megatron_fsdp",
                True,
                f"does not work with {settings.optimizer}",
                "Use Megatron's DistributedDataParallel, or adam",
            )


def _check_qk_clip(settings: Settings, chunk: Any) -> None:
    if not getattr(getattr(chunk, "config", None), "qk_clip", False):
        return
    reasons = {
        "optimizer_cpu_offload": "keeps main weights in the host's memory",
        "use_precision_aware_optimizer": "keeps main weights inside Transformer Engine's Adam",
        "fp8_param_gather": "gathers weights of 8 bits",
        "fp4_param_gather": "gathers weights of 4 bits",
    }
    for name, reason in reasons.items():
        if getattr(settings.config, name, False) or getattr(chunk.ddp_config, name, False):
            rule = f"scales main weights and the model's in place, and {name} {reason}"
            raise ConfigurationError("qk_clip", True, rule, f"Set qk_clip=False or {name}=False")
