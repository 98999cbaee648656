"""Resolves a configuration into checked ``Settings``, the only form that other code reads."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from megatron_eopt.base.errors import check_choice
from megatron_eopt.base.names import IN_RANK_FILES, STANDARD_OPTIMIZERS
from megatron_eopt.config import checks, registry
from megatron_eopt.config.config import TorchOptimizerConfig, complete
from megatron_eopt.config.values import read_config
from megatron_eopt.matrices import SplitT

StorageT = Literal["replicated", "sharded"]
"""Main weights and state are copied to every data-parallel rank, or sharded (ZeRO-1)."""

_OWN_RATES = {
    "max_lr": "lr",
    "min_lr": "min_lr",
    "start_wd": "weight_decay",
    "end_wd": "weight_decay",
}
"""Keys of parameter groups, and the field that sets each after an optimizer's prefix."""

_UPSTREAM = (
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
    "overlap_param_gather_with_optimizer_step",
)
"""Modes that only megatron-core's own optimizer supports, with Adam and SGD."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that do not depend on its optimizers."""

    # all fields, with values of the declared types; those that the caller's configuration lacks act
    # like megatron-core. It is passed on to megatron-core's classes, too
    config: Any = field(repr=False, compare=False)
    # the caller's, perhaps the same object; like megatron-core's, steps read its present values
    original: Any = field(repr=False, compare=False)
    # the 16-bit type of weights, which then have float32 main copies; None for float32
    half: Literal["bf16", "fp16"] | None
    offload_fraction: float  # share of main weights and state kept in host memory
    prefixes: tuple[str, ...] = ("muon",)  # prefixes of the configuration fields in use

    def first_field(self, name: str, prefixes: Sequence[str] | None = None) -> Any:
        """Return the first of the fields ``<prefix>_<name>`` that is set; None if none is."""
        for prefix in self.prefixes if prefixes is None else prefixes:
            if (value := getattr(self.config, f"{prefix}_{name}", None)) is not None:
                return value
        return None


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """A resolved and checked configuration."""

    optimizer: str  # name of the main optimizer, without ``dist_``
    storage: StorageT
    recommended: bool  # whether the configuration is an ``TorchOptimizerConfig``
    scalar: str  # name of the optimizer of parameters that the main one does not take
    splits: frozenset[SplitT] = frozenset()  # kinds of fused weights to split
    of_dtensors: bool = False  # whether the weights are FSDP's DTensors
    own_loop: bool = False  # whether the caller's training loop steps, without Megatron's scheduler

    @property
    def is_standard(self) -> bool:
        """Whether the main optimizer is Adam or SGD."""
        return self.optimizer in STANDARD_OPTIMIZERS

    @property
    def upstream_modes(self) -> tuple[str, ...]:
        """The modes that are on and that only megatron-core's own Adam and SGD support."""
        if not self.is_standard:
            return ()  # these modes raise an error, or this package has its own
        modes = [*_UPSTREAM, *(["optimizer_cuda_graph"] if self.optimizer == "adam" else [])]
        if self.of_dtensors:
            modes.remove("optimizer_cpu_offload")  # megatron-core's cannot step DTensors
        return tuple(mode for mode in modes if getattr(self.config, mode))

    @property
    def in_rank_files(self) -> bool:
        """Whether sharded state would be saved in Megatron's format ``torch``."""
        return self.storage == "sharded" and getattr(self.original, IN_RANK_FILES, False)

    @property
    def excludes_routers(self) -> bool:
        """Whether routers get the scalar optimizer although the main one takes matrices."""
        is_off = self.first_field("orthogonalize_router") is False
        return is_off and bool(self.default_overrides)

    def splits_weights_of(self, optimizer: str) -> bool:
        """Return whether an optimizer updates the matrices in a fused weight separately.

        megatron-core does so for Muon only. With recommended defaults and sharded storage,
        optimizers with full-matrix state (SOAP) do too.
        """
        layout = registry.state_layout_of(optimizer)
        by_owners = self.recommended and (self.of_dtensors or self.storage == "sharded")
        return registry.is_muon(optimizer) or (layout == "matrix_state" and by_owners)

    def own_rates(self, optimizer: str) -> dict[str, float]:
        """Return the rates and the weight decay that are set for this optimizer only."""
        if optimizer in STANDARD_OPTIMIZERS:
            return {}
        prefixes = registry.prefixes_of(optimizer)
        rates = {f: self.first_field(r, prefixes) for f, r in _OWN_RATES.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    @property
    def default_overrides(self) -> registry.Overrides:
        """The main optimizer's default overrides; a user's overrides take precedence."""
        if self.is_standard:
            return {}
        defaults = copy.deepcopy(registry.entry_of(self.optimizer).default_param_overrides)
        for values in defaults.values():
            if values.get("optimizer") == "adam":
                values["optimizer"] = self.scalar
        return defaults


def resolve(config: Any) -> Settings:
    """Return the settings of an ``OptimizerConfig``, after checking every value in use.

    Raises:
        ConfigurationError: If the optimizer's name is unknown, flags contradict each other or a
            value is out of bounds.
        ConfigurationTypeError: If a value has the wrong type.
    """
    original, config = config, complete(read_config(config))
    name, storage = _name_and_storage(config)
    is_standard = name in STANDARD_OPTIMIZERS
    scalar = name if is_standard else "adam"
    if not is_standard and "muon_scalar_optimizer" in registry.consumed_by(name):
        scalar = config.muon_scalar_optimizer
        check_choice("muon_scalar_optimizer", scalar, checks.CHOICES["muon_scalar_optimizer"])
    checks.check_values(config, {name, scalar})
    if config.muon_overlap_dp_comm:
        ahead = not is_standard and registry.looks_ahead(registry.arguments_cls_of(name))
        checks.refuse_for_overlap(config, is_served=ahead and storage == "sharded")
    splits: tuple[SplitT, ...] = get_args(SplitT.__value__)
    return Settings(
        **_of_the_run(config, original),
        prefixes=registry.prefixes_of(name),
        scalar=scalar,
        optimizer=name,
        storage=storage,
        recommended=isinstance(config, TorchOptimizerConfig),
        splits=frozenset(s for s in splits if getattr(config, f"muon_split_{s}")),
    )


def resolve_run(config: Any) -> RunSettings:
    """Return a run's settings for optimizers that the caller has built.

    Raises:
        ConfigurationError: If a value is out of bounds, flags contradict each other, or a mode
            needs megatron-core's own Adam.
        ConfigurationTypeError: If a value has the wrong type.
    """
    original, config = config, complete(read_config(config))
    checks.check_values(config, ())
    checks.refuse_for_matrices(config)
    return RunSettings(**_of_the_run(config, original))


def _of_the_run(config: Any, original: Any) -> dict[str, Any]:
    offloads = config.optimizer_cpu_offload
    return {
        "config": config,
        "original": original,
        "half": "bf16" if config.bf16 else "fp16" if config.fp16 else None,
        "offload_fraction": config.optimizer_offload_fraction if offloads else 0.0,
    }


def _name_and_storage(config: Any) -> tuple[str, StorageT]:
    name = config.optimizer
    layer_wise = bool(getattr(config, "use_layer_wise_distributed_optimizer", False))
    # older releases of megatron-core chose sharded state by this prefix
    bare = name.removeprefix("dist_")
    if bare != name and name not in registry.optimizer_names():
        warnings.warn(
            f"optimizer={name!r} is deprecated; use optimizer={bare!r} with "
            "use_distributed_optimizer=True",
            DeprecationWarning,
            stacklevel=4,
        )
        name, layer_wise = bare, True
    check_choice("optimizer", name, registry.optimizer_names())
    layer_wise = layer_wise and name not in STANDARD_OPTIMIZERS
    return name, "sharded" if layer_wise or config.use_distributed_optimizer else "replicated"
