"""Which storage serves a model: whoever was registered last is asked first."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.build.chain import OptimizerChain
from megatron_eopt.routing.model import Routing
from megatron_eopt.settings.settings import Settings


@dataclass(frozen=True)
class Wanted:
    """What is settled before a storage is chosen."""

    settings: Settings  # the configuration, resolved
    routing: Routing  # which optimizer each parameter gets, agreed by all ranks
    model_chunks: list[Any]  # the wrapped model
    collection: Any  # process groups: the caller's, or Megatron's own
    pg_collection: Any = None  # the caller's, if there are any
    use_gloo: bool = True  # whether gloo groups may serve old checkpoint formats


type BuilderT = Callable[[Wanted], OptimizerChain | None]
"""Returns the chain of a model that its storage serves, None for any other; collective."""

_BUILDERS: list[BuilderT] = []


def register_storage(builder: BuilderT) -> BuilderT:
    """Let ``get_megatron_optimizer`` ask a builder first; works as a decorator, too."""
    _BUILDERS.append(builder)
    return builder


def chain_in_storage(wanted: Wanted) -> OptimizerChain:
    """Return the chain that the first builder makes which serves the model; collective.

    Raises:
        ConfigurationError: If none does, or a setting or a parameter cannot be honoured.
    """
    for builder in reversed(_BUILDERS):
        chain = builder(wanted)
        if chain is not None:
            return chain
    kinds = [type(chunk).__name__ for chunk in wanted.model_chunks]
    rule, way_out = "is wrapped in nothing that a storage serves", "Register one for it"
    raise ConfigurationError("model_chunks", kinds, rule, way_out)
