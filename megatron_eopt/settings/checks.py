"""Checks of a configuration's values, all at build time."""

import logging
import math
from collections.abc import Collection, Iterable
from typing import Any, get_args

from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_eopt.base.agreement import is_rank_0, of_every_rank
from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_choice,
    check_number,
)
from megatron_eopt.base.names import SMALLEST_WAVE_MB, STANDARD_OPTIMIZERS, TpModeT
from megatron_eopt.math import (
    AlgorithmT,
    PrecisionT,
    ScaleModeT,
    backend_names,
    get_backend,
    resolve_coefficients,
)
from megatron_eopt.math.backends import automatic
from megatron_eopt.math.coefficients import check_steps
from megatron_eopt.math.low_precision import MOMENTUM_DTYPES
from megatron_eopt.math.moments import Moment2MethodT
from megatron_eopt.settings.fields import consumed_fields, unconsumed
from megatron_eopt.settings.registry import entry_of, prefixes_of

logger = logging.getLogger(__name__)

_NOT_NEGATIVE = (
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "muon_lr", "muon_min_lr"),
    *("weight_decay", "clip_grad", "grad_norm_skip_threshold", "loss_scale"),
)
_DECAYS = (
    *("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2", "soap_shampoo_beta"),
    *("adaptive_muon_beta2", "sgd_momentum", "muon_momentum"),
)
_POSITIVE = ("adam_eps", "adaptive_muon_eps", "muon_extra_scale_factor")
_BOUNDS: dict[str, dict[str, float]] = {
    **{name: {"at_least": 0.0} for name in _NOT_NEGATIVE},
    **{name: {"at_least": 0.0, "below": 1.0} for name in _DECAYS},
    **{name: {"above": 0.0} for name in _POSITIVE},
    "optimizer_offload_fraction": {"at_least": 0.0, "at_most": 1.0},
    "muon_wave_mb": {"at_least": SMALLEST_WAVE_MB},
    "muon_team_size": {"at_least": 1.0},
}
"""Bounds of numeric fields; those with an optimizer's prefix count only while it is in use."""

CHOICES: dict[str, tuple[str, ...]] = {
    "muon_tp_mode": get_args(TpModeT),
    "muon_scale_mode": get_args(ScaleModeT),
    "muon_fp32_matmul_prec": get_args(PrecisionT),
    "muon_algorithm": get_args(AlgorithmT),
    "muon_momentum_dtype": MOMENTUM_DTYPES,
    "adaptive_muon_moment2_method": get_args(Moment2MethodT),
}

_OPTIMIZER_PREFIXES = ("muon", "adaptive_muon", "lion", "soap", "adam", "sgd")

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
    "use_megatron_fsdp": "cuts the rows that it would scale",
    "overlap_param_gather_with_optimizer_step": "gathers them before they are scaled",
    "muon_overlap_step": "gathers them before they are scaled",
}

_FOR_OVERLAP = {
    "fp16": False,
    "loss_scale": None,
    "optimizer_cpu_offload": False,
    "muon_momentum_dtype": "fp32",
}
"""What a step beside communication needs: what changes gradients or momenta is known too late."""

_FOR_BUCKETS = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "fp8_param_gather": False,
    "fp4_param_gather": False,
    "num_distributed_optimizer_instances": 1,
    "calculate_per_token_loss": False,
}
"""What it needs for buckets to be stepped one by one."""

_FOR_DTENSORS = {
    "fp16": "needs a loss scale, which the training loop has: torch.amp.GradScaler",
    "loss_scale": "belongs to the training loop: torch.amp.GradScaler",
    "use_precision_aware_optimizer": "keeps main weights in Megatron's buffers",
    "optimizer_cpu_offload": "is not supported for DTensors",
    "optimizer_cuda_graph": "is not supported for DTensors",
    "overlap_param_gather_with_optimizer_step": "is about Megatron's buffers",
}

_FOR_OWN_LOOPS = {"grad_norm_skip_threshold": "works with get_megatron_optimizer"}

_OF_THE_MAIN_MUON = {
    "muon_exempt_from_clipping": False,
    "muon_momentum_dtype": "fp32",
    "muon_scalar_optimizer": "adam",
}
"""What counts only where Muon, or one of its family, is the main optimizer, and its default."""

_OF_ANY_MUON = {"muon_lr": None, "muon_min_lr": None}


def check_values(config: Any, optimizers: Iterable[str]) -> None:
    """Raise if a field that one of these optimizers, or any, reads is out of bounds or unfit."""
    prefixes = {prefix for name in optimizers for prefix in prefixes_of(name)}
    for name in (*_BOUNDS, *CHOICES):
        owners = {prefix for prefix in _OPTIMIZER_PREFIXES if name.startswith(f"{prefix}_")}
        in_use = not owners or not owners.isdisjoint(prefixes)
        value = getattr(config, name, None) if in_use else None
        if value is None:
            continue
        if name in CHOICES:
            check_choice(name, value, CHOICES[name])
        elif name != "grad_norm_skip_threshold" or value != math.inf:
            check_number(name, value, **_BOUNDS[name])
    if config.fp16 and config.bf16:
        rule = "cannot hold together with bf16=True: weights have one type"
        raise ConfigurationError("fp16", True, rule, "Leave one of them off")
    if "muon" in prefixes:
        steps, coefficients = config.muon_num_ns_steps, config.muon_coefficient_type
        check_steps("muon_num_ns_steps", steps)
        resolve_coefficients(coefficients, steps, "muon_coefficient_type")
        backend = getattr(config, "muon_backend", "torch")
        check_choice("muon_backend", backend, backend_names())
        get_backend(backend)


def warn_of_unused(config: Any, main: str, optimizers: Collection[str]) -> None:
    """Name the settings that no optimizer in use takes in one warning.

    ``optimizers`` are all of them, of which ``main`` is the one that the configuration names.
    """
    emerging = sorted(set(optimizers) - set(STANDARD_OPTIMIZERS))
    prefixes = tuple(dict.fromkeys(prefix for name in emerging for prefix in prefixes_of(name)))
    consumed: set[str] = set()
    for name in emerging:
        entry = entry_of(name)
        # what one takes is not taken under another's prefix
        consumed |= consumed_fields(entry.optimizer_cls, prefixes_of(name)) | entry.consumes
    unused = set(unconsumed(config, prefixes, consumed))
    for family, defaults in ((prefixes_of(main), _OF_THE_MAIN_MUON), (prefixes, _OF_ANY_MUON)):
        if "muon" not in family:
            unused |= {n for n, unset in defaults.items() if getattr(config, n, unset) != unset}
    if unused and is_rank_0():
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in sorted(unused))
        names = " and ".join(sorted(optimizers))
        logger.warning("these settings have no effect with %s: %s", names, values)


def check_config(config: Any) -> None:
    """Raise a ConfigurationTypeError unless it is a configuration of megatron-core's or ours."""
    if not isinstance(config, OptimizerConfig):
        rule = "must be an OptimizerConfig"
        raise ConfigurationTypeError("config", config, rule, "Pass an EmergingOptimizerConfig")


def check_alike(config: Any) -> None:
    """Raise a ConfigurationError on every rank if the ranks' configurations differ; collective."""
    told = int | float | str | None
    mine = {n: v for n, v in sorted(vars(config).items()) if isinstance(v, told)}
    if mine.get("muon_backend") == "auto":
        # hosts may have other packages
        mine["muon_backend"] = automatic()
    everyones = of_every_rank(mine)
    for name in dict.fromkeys(name for its in everyones for name in its):
        values = {repr(its.get(name)) for its in everyones}
        if len(values) > 1:
            rule = f"is not the same on all ranks, which have {sorted(values)}"
            way_out = "Give every rank the same configuration, and every host the same packages"
            raise ConfigurationError(name, mine.get(name), rule, way_out)


def refuse_for_matrices(config: Any) -> None:
    """Raise a ConfigurationError for the first mode that keeps matrices from being whole."""
    for name, reason in _FOR_MATRICES.items():
        if getattr(config, name, False):
            rule = f"{reason}, so layer-wise storage refuses it"
            raise ConfigurationError(name, True, rule, f"Set {name}=False")


def refuse_for_overlap(config: Any, parts: Iterable[Any] = (), *, is_served: bool = True) -> None:
    """Raise a ConfigurationError for the first field that a step beside communication lacks.

    ``parts`` are configurations of DDP and of the model.
    """
    rules = [] if is_served else ["works with optimizer='muon' and use_distributed_optimizer=True"]
    wanted: list[tuple[Any, ...]] = [(config, *item) for item in _FOR_OVERLAP.items()]
    wanted += [(part, *item) for part in parts for item in _FOR_BUCKETS.items()]
    rules += [f"needs {n}={value!r}" for it, n, value in wanted if getattr(it, n, value) != value]
    if rules:
        raise ConfigurationError("muon_overlap_step", True, rules[0], "Leave muon_overlap_step out")


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
