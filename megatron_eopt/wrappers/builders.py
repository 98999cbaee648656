"""Choose the storage for a wrapped model: builders are tried from the last registered one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron.core import optimizer as megatron_optimizer
from torch.nn import Module, ModuleList

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.config.arguments import arguments_of
from megatron_eopt.config.checks import refuse_for_qk_clip
from megatron_eopt.config.settings import Settings
from megatron_eopt.megatron_core.process_groups import process_groups
from megatron_eopt.optimizers.scalar import FusedClasses
from megatron_eopt.routing.model import Routing
from megatron_eopt.wrappers.chain import OptimizerChain

OF_DDP = "DistributedDataParallelConfig."


@dataclass(frozen=True)
class OptimizerBuildContext:
    """The model and the resolved configuration that a builder gets."""

    settings: Settings  # the resolved configuration
    routing: Routing  # which optimizer each parameter gets, the same on all ranks
    model_chunks: list[Any]  # the wrapped model
    pg_collection: Any = None  # the caller's process groups, if any
    use_gloo: bool = True  # whether gloo groups may be used for old checkpoint formats

    @cached_property
    def collection(self) -> Any:
        """The caller's process groups, or Megatron's global ones."""
        return process_groups(self.pg_collection)

    @cached_property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """Constructor arguments of the optimizers other than Adam and SGD, by their names."""
        optimizers = self.routing.optimizers
        return arguments_of(optimizers, self.settings, self.model_chunks, self.collection)


type BuilderT = Callable[[OptimizerBuildContext], OptimizerChain | None]
"""Returns the chain of a model if its storage supports it, else None; collective."""

BUILDERS: list[BuilderT] = []
"""All builders; the last one is tried first."""


def register_storage(builder: BuilderT) -> BuilderT:
    """Register a builder, which ``get_megatron_optimizer`` then tries before all others.

    Args:
        builder: Called on all ranks with an :class:`OptimizerBuildContext`. Returns the optimizer
            chain, or None if its storage does not support the model or the configuration.

    Returns:
        The builder, so that this works as a decorator.
    """
    BUILDERS.append(builder)
    return builder


def fused_classes() -> FusedClasses | None:
    """Return the Adam and SGD of Transformer Engine, else Apex's; None if neither is installed."""
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return None
    return FusedClasses(megatron_optimizer.Adam, megatron_optimizer.SGD)


def check_chunks(model_chunks: Any) -> None:
    """Raise a ConfigurationTypeError unless this is a list of modules that is not empty."""
    hint = "Pass the list of this rank's wrapped model chunks"
    is_list = isinstance(model_chunks, Sequence | ModuleList)
    is_chunks = is_list and all(isinstance(chunk, Module) for chunk in model_chunks)
    if not is_chunks or not len(model_chunks):
        raise ConfigurationTypeError("model_chunks", model_chunks, "must be modules", hint)


def is_megatron_fsdp(model_chunks: Sequence[Any]) -> bool:
    """Return whether Megatron-FSDP manages the model."""
    wrapped = getattr(model_chunks[0], "ddp_config", None)
    return bool(getattr(wrapped, "use_megatron_fsdp", False))


def check_ddp(settings: Settings, model_chunks: Sequence[Any]) -> None:
    """Raise a ConfigurationError if DDP's gradient reduction does not fit the optimizer."""
    is_sharded = settings.storage == "sharded"
    for chunk in model_chunks:
        ddp_config = getattr(chunk, "ddp_config", None)
        if ddp_config is None:
            continue
        if getattr(getattr(chunk, "config", None), "qk_clip", False):
            hybrid = settings.is_standard and not settings.of_dtensors
            refuse_for_qk_clip(settings.config, ddp_config, hybrid=hybrid)
        scattered = ddp_config.use_distributed_optimizer
        if scattered and not is_sharded:
            rule = (
                "each rank would get only its own part of the gradients, but the optimizer keeps "
                f"all of {settings.optimizer}'s state on every rank"
            )
            hint = "Set it to False, or the optimizer's use_distributed_optimizer to True"
            raise ConfigurationError(OF_DDP + "use_distributed_optimizer", True, rule, hint)
        # Adam alone uses DDP's own buckets; with all other optimizers, an ``AllReducedBuffer``
        # takes the place of buckets that DDP does not have
        if is_sharded and not scattered and settings.is_standard:
            rule = "the model was wrapped without it"
            hint = f"Also set {OF_DDP}use_distributed_optimizer=True"
            raise ConfigurationError("use_distributed_optimizer", True, rule, hint)
