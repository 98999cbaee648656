"""Resolves a configuration into checked ``Settings``, the only form that other code reads."""

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
from megatron_eopt.config import checks, registry
from megatron_eopt.config.config import EmergingOptimizerConfig
from megatron_eopt.config.fields import first_field
from megatron_eopt.config.values import read_config
from megatron_eopt.matrices import SplitT

StorageT = Literal["replicated", "sharded"]
"""Main weights and state are copied to every data-parallel rank, or sharded (ZeRO-1)."""

_OWN_RATES = {"max_lr": "lr", "min_lr": "min_lr"}
"""Keys of parameter groups, and the field that sets each after an optimizer's prefix."""

_UPSTREAM = (
    "use_precision_aware_optimizer",
    "optimizer_cpu_offload",
    "overlap_param_gather_with_optimizer_step",
)
"""Modes that only megatron-core's own optimizer supports, with Adam and SGD."""


@dataclass(frozen=True)
class LossScale:
    """The requested loss scale."""

    constant: float | None  # None for a dynamic scale
    dynamic: Mapping[str, Any]  # arguments of megatron-core's ``DynamicGradScaler``


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run that do not depend on its optimizers."""

    # the configuration with values of the declared types, passed on to megatron-core's classes
    config: Any = field(repr=False, compare=False)
    original: Any = field(repr=False, compare=False)  # the caller's, usually the same object
    lr: float | None  # peak learning rate; None if a scheduler sets it later
    min_lr: float | None
    weight_decay: float
    decoupled_weight_decay: bool  # True as in AdamW, False for L2 regularization
    # the 16-bit type of weights, which then have float32 main copies; None for float32
    half: Literal["bf16", "fp16"] | None
    loss_scale: LossScale | None
    upstream_modes: tuple[str, ...]  # the modes of _UPSTREAM that are on
    offload_fraction: float  # share of main weights and state kept in host memory
    fresh_state: frozenset[str]  # kinds of state that a checkpoint may lack
    momentum_from_adam: bool  # whether missing momentum starts from Adam's first moment
    prints_routing: bool  # whether to log the routing table
    logs_memory: bool  # whether to log memory use
    logs_stats: bool  # whether steps are measured unless a caller changes it
    wave_mb: float  # MiB of full matrices that a rank assembles at a time
    team_size: int  # most ranks that share a matrix in sharded storage
    overlaps_step: bool  # whether Muon's step overlaps communication
    reuses_gradient_buffers: bool  # whether weights in 8 bits are gathered there
    exempt_from_clipping: bool  # whether Muon's gradients are never clipped

    # like megatron-core's, steps read the present values of the caller's configuration

    @property
    def clip_grad(self) -> float:
        """Largest gradient norm after clipping; 0 turns clipping off."""
        return float(self.original.clip_grad)

    @property
    def skip_threshold(self) -> float:
        """Gradient norm above which a step is skipped."""
        return float(self.original.grad_norm_skip_threshold)

    @property
    def counts_zeros(self) -> bool:
        """Whether to count the zeros in gradients."""
        return bool(self.original.log_num_zeros_in_grad)


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """A resolved and checked configuration."""

    optimizer: str  # name of the main optimizer, without ``dist_``
    storage: StorageT
    recommended: bool  # whether the configuration is an ``EmergingOptimizerConfig``
    scalar: str  # name of the optimizer of parameters that the main one does not take
    splits: frozenset[SplitT] = frozenset()  # kinds of fused weights to split
    router_to_scalar: bool = False  # whether router weights use the scalar optimizer
    takes_excluded: bool = False  # whether ``use_muon = False`` on a parameter is ignored
    convolutions: bool = False  # whether convolutions are flattened to matrices
    prefixes: tuple[str, ...] = ()  # prefixes of the configuration fields in use
    tp_mode: TpModeT = "auto"  # how tensor-parallel matrices are computed
    of_dtensors: bool = False  # whether the weights are FSDP's DTensors
    own_loop: bool = False  # whether the caller's training loop steps, without Megatron's scheduler

    @property
    def is_standard(self) -> bool:
        """Whether the main optimizer is Adam or SGD."""
        return self.optimizer in STANDARD_OPTIMIZERS

    @property
    def fuses_adam(self) -> bool:
        """Whether Adam may use torch's fused kernel, which rounds unlike megatron-core's."""
        backend = getattr(self.config, "muon_backend", "emerging_optimizers")
        return self.recommended and backend != "emerging_optimizers"

    def splits_weights_of(self, optimizer: str) -> bool:
        """Return whether an optimizer updates the matrices in a fused weight separately.

        megatron-core does so for Muon only. With recommended defaults and sharded storage,
        optimizers with full-matrix state (SOAP) do too.
        """
        layout = registry.state_layout_of(optimizer)
        by_owners = self.recommended and (self.of_dtensors or self.storage == "sharded")
        return registry.is_muon(optimizer) or (layout == "matrix_state" and by_owners)

    def own_rates(self, optimizer: str) -> dict[str, float]:
        """Return the ``max_lr`` and ``min_lr`` that are set for this optimizer only."""
        if optimizer in STANDARD_OPTIMIZERS:
            return {}
        prefixes = registry.prefixes_of(optimizer)
        rates = {f: first_field(self.config, r, prefixes) for f, r in _OWN_RATES.items()}
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
    original, config = config, read_config(config)
    name, storage = _name_and_storage(config)
    standard: dict[str, Any] = {"scalar": name, "prefixes": (name,)}
    standard["upstream_modes"] = tuple(mode for mode in _UPSTREAM if getattr(config, mode))
    chosen = standard if name in STANDARD_OPTIMIZERS else _of_emerging(name, config)
    checks.check_values(config, {name, chosen["scalar"]})
    if getattr(config, "muon_overlap_step", False):
        checks.refuse_for_overlap(config, is_served=(name, storage) == ("muon", "sharded"))
    splits: tuple[SplitT, ...] = get_args(SplitT.__value__)
    return Settings(
        **_of_the_run(config, original) | chosen,
        optimizer=name,
        storage=storage,
        recommended=isinstance(config, EmergingOptimizerConfig),
        splits=frozenset(s for s in splits if getattr(config, f"muon_split_{s}", False)),
    )


def resolve_run(config: Any) -> RunSettings:
    """Return a run's settings for optimizers that the caller has built.

    Raises:
        ConfigurationError: If a value is out of bounds, flags contradict each other, or a mode
            needs megatron-core's own Adam.
        ConfigurationTypeError: If a value has the wrong type.
    """
    original, config = config, read_config(config)
    checks.check_values(config, ())
    checks.refuse_for_matrices(config)
    exempt = bool(getattr(config, "muon_exempt_from_clipping", False))
    return RunSettings(**_of_the_run(config, original) | {"exempt_from_clipping": exempt})


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
        "convolutions": bool(first_field(config, "convolutions", prefixes, False)),
        "exempt_from_clipping": bool(first_field(config, "exempt_from_clipping", prefixes, False)),
        "prefixes": (*prefixes, "lion") if scalar == "lion" else prefixes,
    }
    if "muon" in prefixes:
        chosen["tp_mode"] = config.muon_tp_mode
    return chosen


def _of_the_run(config: Any, original: Any) -> dict[str, Any]:
    warn_of_untested_releases()
    offloads = config.optimizer_cpu_offload
    unchanged = ("lr", "min_lr", "weight_decay", "decoupled_weight_decay")
    return {name: getattr(config, name) for name in unchanged} | {
        "config": config,
        "original": original,
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
        # other optimizers also work in waves
        "wave_mb": getattr(config, "muon_wave_mb", DEFAULT_WAVE_MB),
        "team_size": getattr(config, "muon_team_size", DEFAULT_TEAM_SIZE),
        "overlaps_step": bool(getattr(config, "muon_overlap_step", False)),
        "reuses_gradient_buffers": bool(
            getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False)
        ),
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
    name = config.optimizer
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
