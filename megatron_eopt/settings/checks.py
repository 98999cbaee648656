"""Checks of a configuration's values, all at build time."""

import dataclasses
import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_eopt.base.agreement import of_every_rank
from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_choice,
    check_number,
    check_switch,
)
from megatron_eopt.base.names import STANDARD_OPTIMIZERS, TpModeT
from megatron_eopt.math import (
    AlgorithmT,
    PrecisionT,
    ScaleModeT,
    backend_names,
    get_backend,
    resolve_coefficients,
)
from megatron_eopt.math.coefficients import check_steps
from megatron_eopt.math.low_precision import MOMENTUM_DTYPES
from megatron_eopt.math.moments import Moment2MethodT
from megatron_eopt.settings.config import EmergingOptimizerConfig
from megatron_eopt.settings.fields import check_all_consumed, check_old_spellings, consumed_fields
from megatron_eopt.settings.refusals import refuse_unsupported_modes
from megatron_eopt.settings.registry import entry_of, prefixes_of

_NOT_NEGATIVE = {"at_least": 0.0}
_POSITIVE = {"above": 0.0}
_DECAY = {"at_least": 0.0, "below": 1.0}
_SCALE = {"at_least": 2.0**-126, "at_most": 2.0**126}
"""Whose inverse float32 has, too, with all its bits."""

_BOUNDS: dict[str, dict[str, float]] = {
    "lr": _NOT_NEGATIVE,
    "min_lr": _NOT_NEGATIVE,
    "decoupled_lr": _NOT_NEGATIVE,
    "decoupled_min_lr": _NOT_NEGATIVE,
    "muon_lr": _NOT_NEGATIVE,
    "muon_min_lr": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "clip_grad": _NOT_NEGATIVE,
    "grad_norm_skip_threshold": _NOT_NEGATIVE,
    "loss_scale": _NOT_NEGATIVE,
    "adam_beta1": _DECAY,
    "adam_beta2": _DECAY,
    "lion_beta1": _DECAY,
    "lion_beta2": _DECAY,
    "soap_shampoo_beta": _DECAY,
    "adaptive_muon_beta2": _DECAY,
    "sgd_momentum": _DECAY,
    "muon_momentum": _DECAY,
    "muon_momentum_beta": _DECAY,
    "adam_eps": _POSITIVE,
    "adaptive_muon_eps": _POSITIVE,
    "initial_loss_scale": _SCALE,
    "min_loss_scale": _SCALE,
    "loss_scale_window": _POSITIVE,
    "hysteresis": {"at_least": 1.0},
    "muon_extra_scale_factor": _POSITIVE,
}
"""Bounds of numeric fields; those with an optimizer's prefix count only while it is in use."""

CHOICES: dict[str, tuple[str, ...]] = {
    "muon_tp_mode": get_args(TpModeT),
    "muon_mode": get_args(TpModeT),
    "muon_scale_mode": get_args(ScaleModeT),
    "muon_fp32_matmul_prec": get_args(PrecisionT),
    "muon_algorithm": get_args(AlgorithmT),
    "muon_momentum_dtype": MOMENTUM_DTYPES,
    "adaptive_muon_moment2_method": get_args(Moment2MethodT),
}

_OPTIMIZER_PREFIXES = ("muon", "adaptive_muon", "lion", "soap")

_SWITCHES = tuple(
    f.name for f in dataclasses.fields(EmergingOptimizerConfig) if isinstance(f.default, bool)
)
"""Fields that are on or off; None counts as off."""

_MAY_BE_NONE = frozenset(
    {"lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "loss_scale", *_SWITCHES}
    | {"muon_lr", "muon_min_lr", "muon_momentum_beta", "muon_mode"}
)

_FOR_MATRICES = {
    "use_precision_aware_optimizer": "keeps main parameters inside Transformer Engine's Adam, "
    "where matrices cannot be redistributed from",
    "reuse_grad_buf_for_mxfp8_param_ag": "overwrites gradients before all optimizers have stepped",
    "optimizer_cuda_graph": "cannot capture the collectives that bring matrices together",
    "overlap_param_gather_with_optimizer_step": "gathers parameters before all have been stepped",
}

_FOR_QK_CLIP = {
    "optimizer_cpu_offload": "keeps main weights inside megatron-core's hybrid optimizer",
    "use_precision_aware_optimizer": "keeps main weights inside Transformer Engine's Adam",
    "fp8_param_gather": "gathers weights of 8 bits",
    "fp4_param_gather": "gathers weights of 4 bits",
}

_FOR_DTENSORS = {
    "fp16": "needs a loss scale, which the training loop has: torch.amp.GradScaler",
    "loss_scale": "belongs to the training loop: torch.amp.GradScaler",
    "use_precision_aware_optimizer": "keeps main weights in Megatron's buffers",
    "optimizer_cpu_offload": "is not supported for DTensors",
    "optimizer_cuda_graph": "is not supported for DTensors",
    "overlap_param_gather_with_optimizer_step": "is about Megatron's buffers",
}

_FOR_OWN_LOOPS = dict.fromkeys(
    (
        "grad_norm_skip_threshold",
        "log_num_zeros_in_grad",
        "log_optimizer_memory",
        "log_optimizer_stats",
        "checkpoint_fresh_state",
        "checkpoint_momentum_from_adam",
    ),
    "works with get_megatron_optimizer",
)

_WHERE_MUON_IS_THE_MAIN_ONE = {
    "muon_exempt_from_clipping": (
        False,
        "is about Muon's gradients, and {}'s are always clipped",
        "Leave it off, or set clip_grad=0",
    ),
    "muon_momentum_dtype": (
        "fp32",
        "is about Muon's momentum, and {} has none of it",
        'Leave it at "fp32", or train with muon or adaptive_muon',
    ),
    "muon_scalar_optimizer": (
        "adam",
        "is about Muon and its family, and beside {} adam steps what is no matrix",
        'Leave it at "adam"',
    ),
}
"""What only the main optimizer's configuration says: unset, why others refuse it, the way out."""


def check_values(config: Any, optimizer: str, prefixes: tuple[str, ...], scalar: str) -> None:
    """Raise if a field in use is out of bounds, does not fit the optimizer or has no effect.

    ``optimizer`` is the main one, whose fields have ``prefixes``; ``scalar`` takes the rest.
    """
    refuse_unsupported_modes(config, optimizer)
    _check_fields(config, prefixes)
    _check_halves(config)
    _check_own_rates(config, "decoupled", "the embeddings")
    for name, (unset, rule, way_out) in _WHERE_MUON_IS_THE_MAIN_ONE.items():
        value = getattr(config, name, unset)
        if value != unset and "muon" not in prefixes:
            raise ConfigurationError(name, value, rule.format(optimizer), way_out)
    if optimizer not in STANDARD_OPTIMIZERS:
        _check_emerging(config, {optimizer, scalar}, prefixes)


def check_values_of(config: Any, optimizers: Iterable[str]) -> None:
    """Raise if a field of optimizers in use is out of bounds, does not fit or has no effect.

    ``optimizers`` are all of them; :func:`check_values` is for what a configuration says alone.
    """
    names = set(optimizers)
    emerging = sorted(names - set(STANDARD_OPTIMIZERS))
    prefixes = tuple(dict.fromkeys(p for name in emerging for p in prefixes_of(name)))
    _check_fields(config, prefixes)
    _check_halves(config)
    if emerging:
        _check_emerging(config, emerging, prefixes)
    for name in ("muon_lr", "muon_min_lr"):
        value = getattr(config, name, None)
        if names and value is not None and "muon" not in prefixes:
            rule = (
                f"is about Muon and its family, and has no effect on {' and '.join(sorted(names))}"
            )
            raise ConfigurationError(name, value, rule, "Leave it at None")


def _check_fields(config: Any, prefixes: Collection[str]) -> None:
    for name in (*_BOUNDS, *CHOICES, *_SWITCHES):
        owners = {prefix for prefix in _OPTIMIZER_PREFIXES if name.startswith(f"{prefix}_")}
        if (owners and owners.isdisjoint(prefixes)) or not hasattr(config, name):
            continue
        value = getattr(config, name)
        if value is None and name in _MAY_BE_NONE:
            continue
        check_field(name, value)


def check_config(config: Any) -> None:
    """Raise a ConfigurationTypeError unless it is a configuration of megatron-core's or ours."""
    if not isinstance(config, OptimizerConfig):
        rule = "must be an OptimizerConfig"
        raise ConfigurationTypeError("config", config, rule, "Pass an EmergingOptimizerConfig")


def check_field(name: str, value: Any) -> None:
    """Raise if a field has a value that it cannot have."""
    if name in CHOICES:
        check_choice(name, value, CHOICES[name])
    elif name in _SWITCHES:
        check_switch(name, value)
    elif name != "grad_norm_skip_threshold" or value != math.inf:
        check_number(name, value, **_BOUNDS[name])


def _check_emerging(config: Any, optimizers: Collection[str], prefixes: Sequence[str]) -> None:
    check_old_spellings(config, prefixes)
    if "muon" in prefixes:
        steps, coefficients = config.muon_num_ns_steps, config.muon_coefficient_type
        check_steps("muon_num_ns_steps", steps)
        resolve_coefficients(coefficients, steps, "muon_coefficient_type")
        backend = getattr(config, "muon_backend", "torch")
        check_choice("muon_backend", backend, backend_names())
        get_backend(backend)
        _check_own_rates(config, "muon", "Muon")
    consumed: set[str] = set()
    for name in set(optimizers) - set(STANDARD_OPTIMIZERS):
        entry = entry_of(name)
        # what one takes is not taken under another's prefix
        consumed |= consumed_fields(entry.optimizer_cls, prefixes_of(name)) | entry.consumes
    check_all_consumed(config, prefixes, consumed)


def _check_halves(config: Any) -> None:
    """Raise if weights are to have two types at once, or one that is none; loss scales, too."""
    if config.fp16 and config.bf16:
        rule = "cannot hold together with bf16=True: weights have one type"
        raise ConfigurationError("fp16", True, rule, "Leave one of them off")
    dtype = config.params_dtype
    if not isinstance(dtype, torch.dtype):
        rule, way_out = "must be a dtype of torch", "Give torch.float32 or torch.bfloat16"
        raise ConfigurationTypeError("params_dtype", dtype, rule, way_out)
    if config.loss_scale:
        check_number("loss_scale", config.loss_scale, **_SCALE)
    if config.loss_scale_window != round(config.loss_scale_window):
        rule = "is compared with a count of steps, so that the scale would never grow"
        raise ConfigurationError(
            "loss_scale_window", config.loss_scale_window, rule, "Give a whole number"
        )
    if config.fp16 and not config.loss_scale and config.min_loss_scale > config.initial_loss_scale:
        rule = f"must not be above initial_loss_scale={config.initial_loss_scale!r}"
        way_out = "Lower it, or raise initial_loss_scale"
        raise ConfigurationError("min_loss_scale", config.min_loss_scale, rule, way_out)


def check_rates(own: Mapping[str, float | None], common: Sequence[float | None], of: str) -> None:
    """Raise if own learning rates would turn a schedule around.

    ``own`` are the largest and the smallest one by their names, ``common`` those in place of None.
    """
    given = [pair for pair in own.items() if pair[1] is not None]
    both = zip(own.values(), common, strict=True)
    largest, smallest = (mine if mine is not None else its for mine, its in both)
    if not given or largest is None or smallest is None or smallest <= largest:
        return
    rule = f"rates of {of} would go from {largest!r} to {smallest!r}, and must not grow"
    (name, value), *_ = given
    raise ConfigurationError(name, value, rule, f"Give {' and '.join(own)} the other way around")


def _check_own_rates(config: Any, prefix: str, of: str) -> None:
    names = (f"{prefix}_lr", f"{prefix}_min_lr")
    own = {name: getattr(config, name, None) for name in names}
    check_rates(own, (config.lr, config.min_lr), of)


def check_alike(config: Any) -> None:
    """Raise a ConfigurationError on every rank if the ranks' configurations differ; collective."""
    told = int | float | str | None
    mine = {n: v for n, v in sorted(vars(config).items()) if isinstance(v, told)}
    if len(set(of_every_rank(zlib.crc32(repr(mine).encode())))) == 1:
        return
    everyones = of_every_rank(mine)
    for name in dict.fromkeys(name for its in everyones for name in its):
        values = {repr(its.get(name)) for its in everyones}
        if len(values) > 1:
            rule = f"is not the same on all ranks, which have {sorted(values)}"
            way_out = "Give every rank the same configuration"
            raise ConfigurationError(name, mine.get(name), rule, way_out)


def refuse_for_matrices(config: Any) -> None:
    """Raise a ConfigurationError for the first mode that keeps matrices from being whole."""
    for name, reason in _FOR_MATRICES.items():
        if getattr(config, name, False):
            rule = f"{reason}, so layer-wise storage refuses it"
            raise ConfigurationError(name, True, rule, f"Set {name}=False")


def refuse_for_qk_clip(config: Any, ddp_config: Any, *, hybrid: bool) -> None:
    """Raise a ConfigurationError for the first mode that keeps weights from being scaled.

    With ``hybrid`` megatron-core's own optimizer off-loads.
    """
    for name, reason in _FOR_QK_CLIP.items():
        is_on = getattr(config, name, False) or getattr(ddp_config, name, False)
        if is_on and (hybrid or name != "optimizer_cpu_offload"):
            rule = f"scales main weights and the model's in place, and {name} {reason}"
            raise ConfigurationError("qk_clip", True, rule, f"Set qk_clip=False or {name}=False")


def refuse_for_dtensors(config: Any, *, own_loop: bool) -> None:
    """Raise for the first field that has no meaning for DTensors, or without Megatron's loop."""
    for name, rule in (_FOR_DTENSORS | (_FOR_OWN_LOOPS if own_loop else {})).items():
        value = getattr(config, name, None)
        # each step is skipped above a threshold of 0
        if value not in (None, math.inf) if name == "grad_norm_skip_threshold" else value:
            raise ConfigurationError(name, value, f"{rule}, not here", f"Leave {name} unset")
