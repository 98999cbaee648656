"""Which storage serves a model: whoever was registered last is asked first."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_eopt.build.chain import OptimizerChain
from megatron_eopt.routing.model import Routing
from megatron_eopt.settings.settings import Settings
from megatron_eopt.storage.buffers import process_groups


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
