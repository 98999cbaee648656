"""What a configuration means, resolved and checked once; nothing else reads a configuration."""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from megatron_eopt.base.errors import check_choice
from megatron_eopt.base.names import (
    DEFAULT_TEAM_SIZE,
    DEFAULT_WAVE_MB,
    SCALAR_OPTIMIZERS,
    STANDARD_OPTIMIZERS,
    TpModeT,
)
from megatron_eopt.base.upstream import warn_of_untested_releases
from megatron_eopt.matrices import SplitT
from megatron_eopt.settings import checks, registry
from megatron_eopt.settings.config import EmergingOptimizerConfig
from megatron_eopt.settings.fields import first_field

StorageT = Literal["replicated", "sharded"]
"""Where main weights and state live: whole on every data-parallel rank, or in ZeRO-1 fragments."""

_OWN_RATES = {"max_lr": "lr", "min_lr": "min_lr"}
"""Keys of parameter groups, and how the fields end that hold an optimizer's own values."""

_UPSTREAM = (
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
    "overlap_param_gather_with_optimizer_step",
)
"""Modes that Adam and SGD have in megatron-core's own optimizer alone."""


@dataclass(frozen=True)
class LossScale:
    """The loss scale that was asked for."""

    constant: float | None  # a fixed scale; None for a dynamic one
    dynamic: Mapping[str, Any]  # arguments of megatron-core's ``DynamicGradScaler``


@dataclass(frozen=True)
class RunSettings:
    """What holds for a run whatever its optimizers are."""

    # the caller's configuration, for megatron-core's own classes alone
    config: Any = field(repr=False, compare=False)
    lr: float | None  # the largest learning rate; None if something else will write it
    min_lr: float | None  # the smallest one
    weight_decay: float
    decoupled_weight_decay: bool  # whether weights themselves decay, as AdamW's do
    # the 16-bit type of weights, which then have float32 main copies; None for float32
    half: Literal["bf16", "fp16"] | None
    loss_scale: LossScale | None  # None without
    upstream_modes: tuple[str, ...]  # those that are on; see _UPSTREAM
    # how much of main weights and state is kept on the host and comes in waves
    offload_fraction: float
    # kinds of state that may start anew where a checkpoint lacks them
    fresh_state: frozenset[str]
    momentum_from_adam: bool  # whether momentum it lacks begins as Adam's first moment
    prints_routing: bool  # whether a table of all routes is logged
    logs_memory: bool  # whether a step is measured, and what memory is used for is logged
    logs_stats: bool  # whether steps are measured unless a caller says otherwise
    wave_mb: float  # MiB of whole matrices that one rank brings together at a time
    team_size: int  # most ranks that compute a matrix together in sharded storage
    overlaps_step: bool  # whether Muon steps while gradients are reduced and parameters gathered
    # whether gradients of optimizers that need matrices are never clipped
    exempt_from_clipping: bool

    # as megatron-core does, steps look at what the caller's configuration says then

    @property
    def clip_grad(self) -> float:
        """Largest gradient norm; 0 for any."""
        return float(self.config.clip_grad)

    @property
    def skip_threshold(self) -> float:
        """Steps with a larger gradient norm are skipped."""
        return float(self.config.grad_norm_skip_threshold)

    @property
    def counts_zeros(self) -> bool:
        """Whether zeros in gradients are counted."""
        return bool(self.config.log_num_zeros_in_grad)


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """One configuration, resolved."""

    optimizer: str  # name of the main optimizer, without ``dist_``
    storage: StorageT  # where main weights and state live
    recommended: bool  # whether defaults are the ones recommended here, not megatron-core's
    scalar: str  # the optimizer of what the main one does not take
    splits: frozenset[SplitT] = frozenset()  # kinds of fused weights to split
    router_to_scalar: bool = False  # whether routers' weights go to the scalar optimizer
    takes_excluded: bool = False  # whether matrices that modules exclude go to the main one
    prefixes: tuple[str, ...] = ()  # prefixes of the configuration's fields in use
    tp_mode: TpModeT = "auto"  # where tensor-parallel matrices are computed
    of_dtensors: bool = False  # whether FSDP keeps the weights

    @property
    def is_standard(self) -> bool:
        """Whether the main optimizer is Adam or SGD."""
        return self.optimizer in STANDARD_OPTIMIZERS

    @property
    def fuses_adam(self) -> bool:
        """Whether torch's Adam may round otherwise than megatron-core's."""
        backend = getattr(self.config, "muon_backend", "emerging_optimizers")
        return self.recommended and backend != "emerging_optimizers"

    def splits_weights_of(self, optimizer: str) -> bool:
        """Return whether an optimizer gets the matrices of fused weights one by one.

        megatron-core splits them for Muon's family alone. With recommended defaults those who own
        matrices do so too, for optimizers whose state is that of whole matrices (SOAP).
        """
        layout = registry.state_layout_of(optimizer)
        by_owners = self.recommended and (self.of_dtensors or self.storage == "sharded")
        return registry.is_muon(optimizer) or (layout == "matrix_state" and by_owners)

    def own_rates(self, optimizer: str) -> dict[str, float]:
        """Return an optimizer's ``max_lr`` and ``min_lr`` where they are its own."""
        if optimizer in STANDARD_OPTIMIZERS:
            return {}
        prefixes = registry.prefixes_of(optimizer)
        rates = {f: first_field(self.config, r, prefixes) for f, r in _OWN_RATES.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    @property
    def default_overrides(self) -> registry.Overrides:
        """The overrides that come with the main optimizer; a user's go before."""
        if self.is_standard:
            return {}
        defaults = copy.deepcopy(registry.entry_of(self.optimizer).default_param_overrides)
        for values in defaults.values():
            if values.get("optimizer") == "adam":
                values["optimizer"] = self.scalar
        return defaults


def resolve(config: Any) -> Settings:
    """Return what an ``OptimizerConfig`` means, having checked every value in use.

    Raises:
        ConfigurationError: If the optimizer's name is unknown, flags contradict each other, a value
            is out of bounds or a field has no effect.
        ConfigurationTypeError: If something is of the wrong type.
    """
    checks.check_config(config)
    name, storage = _name_and_storage(config)
    standard: dict[str, Any] = {"scalar": name, "prefixes": (name,)}
    standard["upstream_modes"] = tuple(mode for mode in _UPSTREAM if getattr(config, mode))
    chosen = standard if name in STANDARD_OPTIMIZERS else _of_emerging(name, config)
    checks.check_values(config, {name, chosen["scalar"]})
    if getattr(config, "muon_overlap_step", False):
        checks.refuse_for_overlap(config, is_served=(name, storage) == ("muon", "sharded"))
    splits: tuple[SplitT, ...] = get_args(SplitT.__value__)
    return Settings(
        **_of_the_run(config) | chosen,
        optimizer=name,
        storage=storage,
        recommended=isinstance(config, EmergingOptimizerConfig),
        splits=frozenset(s for s in splits if getattr(config, f"muon_split_{s}", False)),
    )


def resolve_run(config: Any) -> RunSettings:
    """Return what ``config`` says apart from optimizers, which a caller has built by itself.

    What needs megatron-core's own Adam is refused.

    Raises:
        ConfigurationError: If a value is out of bounds, or flags contradict each other.
        ConfigurationTypeError: If something is of the wrong type.
    """
    checks.check_config(config)
    checks.check_values(config, ())
    checks.refuse_for_matrices(config)
    exempt = bool(getattr(config, "muon_exempt_from_clipping", False))
    return RunSettings(**_of_the_run(config) | {"exempt_from_clipping": exempt})


def _of_emerging(name: str, config: Any) -> dict[str, Any]:
    entry = registry.entry_of(name)
    prefixes = registry.prefixes_of(name)
    scalar = "adam"
    if "muon_scalar_optimizer" in entry.consumes:
        scalar = config.muon_scalar_optimizer
        check_choice("muon_scalar_optimizer", scalar, SCALAR_OPTIMIZERS)
    chosen = {
        "scalar": scalar,
        "router_to_scalar": not first_field(config, "orthogonalize_router", prefixes, True),
        "takes_excluded": bool(first_field(config, "orthogonalize_excluded", prefixes, False)),
        "exempt_from_clipping": bool(first_field(config, "exempt_from_clipping", prefixes, False)),
        "prefixes": (*prefixes, "lion") if scalar == "lion" else prefixes,
    }
    if "muon" in prefixes:
        chosen["tp_mode"] = config.muon_tp_mode
    return chosen


def _of_the_run(config: Any) -> dict[str, Any]:
    warn_of_untested_releases()
    offloads = config.optimizer_cpu_offload
    unchanged = ("lr", "min_lr", "weight_decay", "decoupled_weight_decay")
    return {name: getattr(config, name) for name in unchanged} | {
        "config": config,
        "half": "bf16" if config.bf16 else "fp16" if config.fp16 else None,
        "loss_scale": _loss_scale(config),
        "upstream_modes": (),
        "offload_fraction": config.optimizer_offload_fraction if offloads else 0.0,
        "fresh_state": frozenset(getattr(config, "checkpoint_fresh_state", ())),
        "momentum_from_adam": bool(getattr(config, "checkpoint_momentum_from_adam", False)),
        "prints_routing": bool(getattr(config, "print_optimizer_routing", False)),
        "logs_memory": bool(getattr(config, "log_optimizer_memory", False)),
        "logs_stats": bool(getattr(config, "log_optimizer_stats", False)),
        "exempt_from_clipping": False,
        # optimizers other than Muon work in waves, too
        "wave_mb": getattr(config, "muon_wave_mb", DEFAULT_WAVE_MB),
        "team_size": getattr(config, "muon_team_size", DEFAULT_TEAM_SIZE),
        "overlaps_step": bool(getattr(config, "muon_overlap_step", False)),
    }


def _loss_scale(config: Any) -> LossScale | None:
    if config.loss_scale:
        return LossScale(config.loss_scale, {})
    if not config.fp16:
        return None
    dynamic = {
        "initial_scale": config.initial_loss_scale,
        "min_scale": config.min_loss_scale,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": config.loss_scale_window,
        "hysteresis": config.hysteresis,
    }
    return LossScale(None, dynamic)


def _name_and_storage(config: Any) -> tuple[str, StorageT]:
    name = str(config.optimizer)
    layer_wise = bool(getattr(config, "use_layer_wise_distributed_optimizer", False))
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
