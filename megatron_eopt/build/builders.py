"""Which storage serves a wrapped model: whoever was registered last is asked first."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.nn import Module, ModuleList

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.build.chain import OptimizerChain
from megatron_eopt.routing.model import Routing
from megatron_eopt.settings.checks import refuse_for_qk_clip
from megatron_eopt.settings.settings import Settings
from megatron_eopt.storage.buffers import process_groups

OF_DDP = "DistributedDataParallelConfig."


@dataclass(frozen=True)
class Wanted:
    """What is settled before a storage is chosen."""

    settings: Settings  # the configuration, resolved
    routing: Routing  # which optimizer each parameter gets, agreed by all ranks
    model_chunks: list[Any]  # the wrapped model
    pg_collection: Any = None  # the caller's process groups, if there are any
    use_gloo: bool = True  # whether gloo groups may serve old checkpoint formats

    @cached_property
    def collection(self) -> Any:
        """Process groups: the caller's, or Megatron's own."""
        return process_groups(self.pg_collection)


type BuilderT = Callable[[Wanted], OptimizerChain | None]
"""Returns the chain of a model that its storage serves, None for any other; collective."""

BUILDERS: list[BuilderT] = []
"""All of them, the one that is asked first last."""


def register_storage(builder: BuilderT) -> BuilderT:
    """Let ``get_megatron_optimizer`` ask a builder first; works as a decorator, too."""
    BUILDERS.append(builder)
    return builder


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
    wrapped = getattr(model_chunks[0], "ddp_config", None)
    return bool(getattr(wrapped, "use_megatron_fsdp", False))


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
            refuse_for_qk_clip(settings.config, ddp_config, hybrid=settings.is_standard)
        scattered = ddp_config.use_distributed_optimizer
        if scattered and not is_sharded:
            rule = (
                "each rank would get only its own part of the gradients, but the optimizer is "
                f"configured to hold all of {settings.optimizer}'s state on every rank"
            )
            way_out = "Set it to False, or the optimizer's use_distributed_optimizer to True"
            raise ConfigurationError(OF_DDP + "use_distributed_optimizer", True, rule, way_out)
        if is_sharded and not scattered and settings.is_standard:
            rule = "the model was wrapped without it"
            way_out = f"Set {OF_DDP}use_distributed_optimizer=True too"
            raise ConfigurationError("use_distributed_optimizer", True, rule, way_out)
