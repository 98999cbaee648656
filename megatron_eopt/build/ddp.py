"""Whether a model is wrapped in the way that an optimizer needs."""

from collections.abc import Sequence
from typing import Any

from torch.nn import Module, ModuleList

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.settings.checks import refuse_for_qk_clip
from megatron_eopt.settings.settings import Settings

_OF_DDP = "DistributedDataParallelConfig."


def check_chunks(model_chunks: Any) -> None:
    """Raise unless these are the modules of a model.

    Raises:
        ConfigurationTypeError: If it is no list of modules, or empty.
    """
    way_out = "Pass the list of this rank's wrapped model chunks"
    is_list = isinstance(model_chunks, Sequence | ModuleList)
    is_chunks = is_list and all(isinstance(chunk, Module) for chunk in model_chunks)
    if not is_chunks or not len(model_chunks):
        raise ConfigurationTypeError("model_chunks", model_chunks, "must be modules", way_out)


def is_megatron_fsdp(model_chunks: Sequence[Any]) -> bool:
    """Whether Megatron's own FSDP manages the model."""
    ddp_config = getattr(model_chunks[0], "ddp_config", None)
    return bool(getattr(ddp_config, "use_megatron_fsdp", False))


def check_ddp(settings: Settings, model_chunks: Sequence[Any]) -> None:
    """Raise if the wrapped model reduces gradients in a way that the optimizer does not expect.

    Raises:
        ConfigurationError: If training would go wrong; the message says which flag to change.
    """
    is_sharded = settings.storage == "sharded"
    for chunk in model_chunks:
        ddp_config = getattr(chunk, "ddp_config", None)
        if ddp_config is None:
            continue
        if getattr(getattr(chunk, "config", None), "qk_clip", False):
            refuse_for_qk_clip(settings.config, ddp_config, hybrid=settings.hybrid)
        scattered = ddp_config.use_distributed_optimizer
        if scattered and not is_sharded:
            rule = (
                "each rank would get only its own part of the gradients, but the optimizer is "
                f"configured to hold all of {settings.optimizer}'s state on every rank"
            )
            way_out = (
                "Set it to False, or set use_distributed_optimizer=True in the optimizer's config"
            )
            raise ConfigurationError(_OF_DDP + "use_distributed_optimizer", True, rule, way_out)
        if is_sharded and not scattered and settings.is_standard:
            rule = "the model was wrapped without it"
            way_out = f"Set {_OF_DDP}use_distributed_optimizer=True too"
            raise ConfigurationError("use_distributed_optimizer", True, rule, way_out)
