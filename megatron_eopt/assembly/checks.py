"""Checks of a configuration's values and of its fit to the wrapped model, all at build time."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, get_args

from megatron_eopt.assembly.config import EmergingOptimizerConfig
from megatron_eopt.assembly.meaning import Meaning
from megatron_eopt.assembly.refusals import refuse_unsupported_modes
from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_choice,
    check_number,
    check_switch,
)
from megatron_eopt.base.names import TpModeT
from megatron_eopt.math import (
    AlgorithmT,
    CoefficientT,
    PrecisionT,
    ScaleModeT,
    get_backend,
    resolve_coefficients,
)
from megatron_eopt.math.moments import Moment2MethodT
from megatron_eopt.optimizers.config_kwargs import (
    check_all_consumed,
    check_old_spellings,
    consumed_fields,
)
from megatron_eopt.optimizers.registry import entry_of

_DECAY: dict[str, float] = {"at_least": 0, "below": 1}
_POSITIVE: dict[str, float] = {"above": 0}
_NOT_NEGATIVE: dict[str, float] = {"at_least": 0}
_FINITE: dict[str, float] = {}

_BOUNDS: dict[str, dict[str, float]] = {
    "lr": _NOT_NEGATIVE,
    "min_lr": _NOT_NEGATIVE,
    "decoupled_lr": _NOT_NEGATIVE,
    "decoupled_min_lr": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "clip_grad": _NOT_NEGATIVE,
    "adam_beta1": _DECAY,
    "adam_beta2": _DECAY,
    "adam_eps": _POSITIVE,
    "sgd_momentum": _DECAY,
    "grad_norm_skip_threshold": _NOT_NEGATIVE,
    "loss_scale": _NOT_NEGATIVE,
    "initial_loss_scale": _POSITIVE,
    "min_loss_scale": _POSITIVE,
    "loss_scale_window": _POSITIVE,
    "hysteresis": {"at_least": 1},
    "optimizer_offload_fraction": _NOT_NEGATIVE,
    "muon_lr": _NOT_NEGATIVE,
    "muon_min_lr": _NOT_NEGATIVE,
    "muon_momentum": _DECAY,
    "muon_momentum_beta": _DECAY,
    "muon_num_ns_steps": {"at_least": 1},
    "muon_extra_scale_factor": _FINITE,
    "lion_beta1": _DECAY,
    "lion_beta2": _DECAY,
    "soap_shampoo_beta": _DECAY,
    "adaptive_muon_beta2": _DECAY,
    "adaptive_muon_eps": _POSITIVE,
}
"""Bounds of numeric fields; those with an optimizer's prefix count only while it is in use."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "muon_tp_mode": get_args(TpModeT),
    "muon_mode": get_args(TpModeT),
    "muon_scale_mode": get_args(ScaleModeT),
    "muon_fp32_matmul_prec": get_args(PrecisionT),
    "muon_algorithm": get_args(AlgorithmT),
    "adaptive_muon_moment2_method": get_args(Moment2MethodT),
}

_OPTIMIZER_PREFIXES = ("muon", "adaptive_muon", "lion", "soap")

_SWITCHES = tuple(
    item.name
    for item in dataclasses.fields(EmergingOptimizerConfig)
    if isinstance(item.default, bool)
)
"""Fields that are on or off; None counts as off."""

_MAY_BE_INFINITE = frozenset({"grad_norm_skip_threshold"})

_MAY_BE_NONE = frozenset(
    {"min_lr", "decoupled_lr", "decoupled_min_lr", "loss_scale"}
    | {"muon_lr", "muon_min_lr", "muon_momentum_beta", "muon_mode"}
)


def check_values(config: Any, meaning: Meaning) -> None:
    """Raise if a field of ``config`` that is in use has a value out of bounds.

    Raises:
        ConfigurationError: If a number or a choice is out of bounds, a mode does not fit the
            optimizer, or a field has no effect.
        ConfigurationTypeError: If something is no number that must be one.
    """
    refuse_unsupported_modes(config, meaning.optimizer)
    for name, bounds in _BOUNDS.items():
        if _in_use(name, meaning) and _is_given(config, name):
            value = getattr(config, name)
            if not (name in _MAY_BE_INFINITE and value == math.inf):
                check_number(name, value, **bounds)
    for name, choices in _CHOICES.items():
        if _in_use(name, meaning) and _is_given(config, name):
            check_choice(name, getattr(config, name), choices)
    _check_switches(config, meaning)
    if config.fp16 and not config.loss_scale and config.min_loss_scale > config.initial_loss_scale:
        raise ConfigurationError(
            "min_loss_scale",
            config.min_loss_scale,
            f"must not be above initial_loss_scale={config.initial_loss_scale!r}",
            "Lower it, or raise initial_loss_scale",
        )
    if meaning.is_standard:
        return
    check_old_spellings(config, meaning.prefixes)
    if "muon" in meaning.prefixes:
        _check_schedule(config)
        resolve_coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
        get_backend(getattr(config, "muon_backend", "torch"))
    entry = entry_of(meaning.optimizer)
    consumed = consumed_fields(entry.optimizer_cls, meaning.prefixes) | entry.consumes
    if meaning.scalar == "lion":
        consumed |= {"lion_beta1", "lion_beta2"}
    check_all_consumed(config, meaning.prefixes, consumed)


def check_ddp(meaning: Meaning, config: Any, model_chunks: Sequence[Any]) -> None:
    """Raise if the wrapped model reduces gradients in a way that the optimizer does not expect.

    Raises:
        ConfigurationError: If training would go wrong; the message says which flag to change.
    """
    for ddp_config in (getattr(chunk, "ddp_config", None) for chunk in model_chunks):
        if ddp_config is None:
            continue
        scattered = ddp_config.use_distributed_optimizer
        if scattered and meaning.storage == "replicated":
            raise ConfigurationError(
                "DistributedDataParallelConfig.use_distributed_optimizer",
                True,
                "each rank would get only its own part of the gradients, but the optimizer is "
                f"configured to hold all of {meaning.optimizer}'s state on every rank",
                "Set it to False, or set use_distributed_optimizer=True in the optimizer's config",
            )
        if not scattered and meaning.storage == "distributed":
            raise ConfigurationError(
                "use_distributed_optimizer",
                True,
                "the model was wrapped without it",
                "Set DistributedDataParallelConfig.use_distributed_optimizer=True too",
            )
        if ddp_config.overlap_param_gather and not scattered:
            raise ConfigurationError(
                "DistributedDataParallelConfig.overlap_param_gather",
                True,
                "there is nothing to gather without a distributed optimizer",
                "Set it to False, or use_distributed_optimizer=True",
            )
        if config.overlap_param_gather_with_optimizer_step and not ddp_config.overlap_param_gather:
            raise ConfigurationError(
                "overlap_param_gather_with_optimizer_step",
                True,
                "needs overlap_param_gather",
                "Set DistributedDataParallelConfig.overlap_param_gather=True too",
            )
        if getattr(ddp_config, "use_megatron_fsdp", False) and not meaning.is_standard:
            raise ConfigurationError(
                "DistributedDataParallelConfig.use_megatron_fsdp",
                True,
                f"does not work with {meaning.optimizer}",
                "Use Megatron's DistributedDataParallel, or adam",
            )


def check_storage(meaning: Meaning, optimizers: set[str]) -> None:
    """Raise if the optimizers in use cannot keep their state where ``meaning`` puts it.

    Args:
        meaning: The configuration.
        optimizers: Names of all optimizers that got a parameter.

    Raises:
        ConfigurationError: If they cannot.
    """
    if meaning.storage == "distributed" and (bad := optimizers - {"adam"}):
        raise ConfigurationError(
            "use_distributed_optimizer",
            True,
            f"fragments of a buffer belong to adam alone, and {sorted(bad)} got parameters too",
            "Set it to False, here and in DistributedDataParallelConfig, or route all to adam",
        )


def _check_switches(config: Any, meaning: Meaning) -> None:
    for name in _SWITCHES:
        value = getattr(config, name, None)
        if _in_use(name, meaning) and value is not None:
            check_switch(name, value)


def _check_schedule(config: Any) -> None:
    steps, coefficients = config.muon_num_ns_steps, config.muon_coefficient_type
    if not isinstance(steps, int):
        raise ConfigurationTypeError(
            "muon_num_ns_steps", steps, "must be an integer", "Give a whole number"
        )
    if isinstance(coefficients, str):
        check_choice("muon_coefficient_type", coefficients, get_args(CoefficientT))


def _is_given(config: Any, name: str) -> bool:
    return hasattr(config, name) and not (getattr(config, name) is None and name in _MAY_BE_NONE)


def _in_use(name: str, meaning: Meaning) -> bool:
    owners = [prefix for prefix in _OPTIMIZER_PREFIXES if name.startswith(f"{prefix}_")]
    return not owners or any(owner in meaning.prefixes for owner in owners)
