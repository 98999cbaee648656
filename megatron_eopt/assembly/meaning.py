"""What a configuration means, resolved once; nothing downstream looks at the flags again."""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_eopt.assembly.config import EmergingOptimizerConfig
from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError, check_choice
from megatron_eopt.base.names import SCALAR_OPTIMIZERS, STANDARD_OPTIMIZERS
from megatron_eopt.matrices import SplitT
from megatron_eopt.optimizers.config_kwargs import first_field
from megatron_eopt.optimizers.registry import entry_of, optimizer_names
from megatron_eopt.routing.overrides import Overrides
from megatron_eopt.routing.routes import Rules

StorageT = Literal["replicated", "distributed", "layer_wise"]
"""Where the optimizer's state lives.

``replicated``: whole on every data-parallel rank. ``distributed``: in fragments, each number
updated by itself. ``layer_wise``: in fragments, with matrices brought together for their update.
"""

_SPLITS: tuple[SplitT, ...] = ("qkv", "gated", "mla", "linear_attention", "per_head")


@dataclass(frozen=True)
class Meaning:
    """One configuration, resolved.

    Attributes:
        optimizer: Name of the main optimizer, without ``dist_``.
        storage: Where the state lives.
        recommended: Whether defaults are the ones recommended here, not megatron-core's.
        scalar: The optimizer of what the main one does not take.
        splits: Kinds of fused weights to split.
        router_to_scalar: Whether routers' weights go to the scalar optimizer.
        exempt_from_clipping: Whether the main optimizer's gradients are never clipped.
        main_lr: ``max_lr`` and ``min_lr`` of the main optimizer where they are its own.
        prefixes: Prefixes of the configuration fields in use.
    """

    optimizer: str
    storage: StorageT
    recommended: bool
    scalar: str
    splits: frozenset[SplitT] = frozenset()
    router_to_scalar: bool = False
    exempt_from_clipping: bool = False
    main_lr: Mapping[str, float] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ()

    @property
    def is_standard(self) -> bool:
        """Whether the main optimizer is Adam or SGD."""
        return self.optimizer in STANDARD_OPTIMIZERS


def resolve(config: Any) -> Meaning:
    """Return what ``config`` means.

    Raises:
        ConfigurationError: If the optimizer's name is unknown, or flags contradict each other.
        ConfigurationTypeError: If the optimizer's name is no string.
    """
    name, storage = _name_and_storage(config)
    recommended = isinstance(config, EmergingOptimizerConfig)
    if name in STANDARD_OPTIMIZERS:
        return Meaning(name, storage, recommended, scalar=name, prefixes=(name,))
    entry = entry_of(name)
    prefixes = entry.prefixes or (name,)
    scalar = _scalar_of(config, entry.consumes)
    lrs = {key: first_field(config, short, prefixes) for key, short in _LRS.items()}
    return Meaning(
        optimizer=name,
        storage=storage,
        recommended=recommended,
        scalar=scalar,
        splits=frozenset(s for s in _SPLITS if getattr(config, f"muon_split_{s}", False)),
        router_to_scalar=not first_field(config, "orthogonalize_router", prefixes, True),
        exempt_from_clipping=bool(first_field(config, "exempt_from_clipping", prefixes, False)),
        main_lr={key: value for key, value in lrs.items() if value is not None},
        prefixes=prefixes if scalar not in ("lion",) else (*prefixes, scalar),
    )


def rules_of(meaning: Meaning) -> Rules:
    """Return how a configuration routes parameters."""
    names = optimizer_names()
    matrices_only = frozenset(
        name
        for name in names
        if name not in STANDARD_OPTIMIZERS and entry_of(name).state_layout != "element_wise"
    )
    return Rules(
        main=meaning.optimizer,
        scalar=meaning.scalar,
        defaults=_default_overrides(meaning),
        router_to_scalar=meaning.router_to_scalar,
        names=names,
        matrices_only=matrices_only,
        main_lr=meaning.main_lr,
    )


_LRS = {"max_lr": "lr", "min_lr": "min_lr"}


def _name_and_storage(config: Any) -> tuple[str, StorageT]:
    name = config.optimizer
    if not isinstance(name, str):
        raise ConfigurationTypeError(
            "optimizer", name, "must be the name of an optimizer", "Give a string"
        )
    layer_wise = bool(getattr(config, "use_layer_wise_distributed_optimizer", False))
    bare = name.removeprefix("dist_")
    if bare != name and name not in optimizer_names():
        warnings.warn(
            f"optimizer={name!r} is deprecated; use optimizer={bare!r} with "
            "use_distributed_optimizer=True",
            DeprecationWarning,
            stacklevel=4,
        )
        name, layer_wise = bare, True
    check_choice("optimizer", name, optimizer_names())
    if name in STANDARD_OPTIMIZERS:
        if layer_wise:
            raise ConfigurationError(
                "use_layer_wise_distributed_optimizer",
                True,
                f"is for optimizers that need whole matrices, and {name} does not",
                "Set use_distributed_optimizer=True instead",
            )
        return name, "distributed" if config.use_distributed_optimizer else "replicated"
    return name, "layer_wise" if layer_wise or config.use_distributed_optimizer else "replicated"


def _scalar_of(config: Any, consumes: frozenset[str]) -> str:
    if "muon_scalar_optimizer" not in consumes:
        return "adam"
    scalar = config.muon_scalar_optimizer
    check_choice("muon_scalar_optimizer", scalar, SCALAR_OPTIMIZERS)
    return str(scalar)


def _default_overrides(meaning: Meaning) -> Overrides:
    if meaning.is_standard:
        return {}
    defaults = copy.deepcopy(entry_of(meaning.optimizer).default_param_overrides)
    for values in defaults.values():
        if values.get("optimizer") == "adam":
            values["optimizer"] = meaning.scalar
    return defaults
