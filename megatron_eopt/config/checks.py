"""Checks of a configuration's values, made when an optimizer is built."""

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, get_args

from megatron_eopt.base import gpu, kernels
from megatron_eopt.base.agreement import gather_objects
from megatron_eopt.base.bounds import BOUNDS
from megatron_eopt.base.errors import (
    ConfigurationError,
    check_cautious,
    check_choice,
    check_number,
    naming,
)
from megatron_eopt.base.log import warn
from megatron_eopt.base.names import (
    CAUTIOUS_DECAY,
    SCALAR_OPTIMIZERS,
    STANDARD_OPTIMIZERS,
    TpModeT,
)
from megatron_eopt.config.fields import (
    constructor_parameters,
    consumed_fields,
    set_arguments,
    type_of,
    unconsumed,
)
from megatron_eopt.config.registry import arguments_cls_of, consumed_by, is_muon, prefixes_of
from megatron_eopt.config.values import kinds_of, read_value
from megatron_eopt.math import (
    AlgorithmT,
    PrecisionT,
    get_backend,
    resolve_coefficients,
    sound_precision,
)
from megatron_eopt.math.backends import PACKAGES, automatic
from megatron_eopt.math.low_precision import MOMENTUM_DTYPES
from megatron_eopt.math.moments import Moment2MethodT
from megatron_eopt.math.orthogonalize import SCALE_MODES

logger = logging.getLogger(__name__)

CHOICES: dict[str, tuple[str, ...]] = {
    "muon_tp_mode": get_args(TpModeT),
    "muon_scale_mode": tuple(SCALE_MODES),
    "muon_fp32_matmul_prec": get_args(PrecisionT),
    "muon_algorithm": get_args(AlgorithmT),
    "muon_momentum_dtype": MOMENTUM_DTYPES,
    "muon_scalar_optimizer": SCALAR_OPTIMIZERS,
    "adaptive_muon_moment2_method": get_args(Moment2MethodT),
}

_OPTIMIZER_PREFIXES = ("muon", "adaptive_muon", "lion", "soap", "adam", "sgd")

_FOR_MATRICES = {
    "use_precision_aware_optimizer": "keeps main weights inside Transformer Engine's Adam",
    "overlap_param_gather_with_optimizer_step": "gathers parameters before all are updated",
    "optimizer_cuda_graph": "captures steps of megatron-core's own Adam alone",
}

_FOR_QK_CLIP = {
    "optimizer_cpu_offload": "keeps main weights inside megatron-core's hybrid optimizer",
    "use_precision_aware_optimizer": "keeps main weights inside Transformer Engine's Adam",
    "fp8_param_gather": "gathers 8-bit weights",
    "fp4_param_gather": "gathers 4-bit weights",
    "use_megatron_fsdp": "shards the rows to be scaled",
    "overlap_param_gather_with_optimizer_step": "gathers weights before they are scaled",
    "muon_overlap_dp_comm": "gathers weights before they are scaled",
}

_FOR_OVERLAP = {
    "fp16": False,
    "loss_scale": None,
    "optimizer_cpu_offload": False,
    "muon_momentum_dtype": "fp32",
}
"""Values that ``muon_overlap_dp_comm`` needs, because updates are computed before the norm."""

_FOR_BUCKETS = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "fp8_param_gather": False,
    "fp4_param_gather": False,
    "num_distributed_optimizer_instances": 1,
    # with it, gradients are divided by the number of tokens after they have been reduced
    "calculate_per_token_loss": False,
    # gradients of parameters that it does not cut are summed over its ranks only afterwards
    "gtp_weight_remat_size": 1,
    "expert_gtp_weight_remat_size": 1,
}
"""Values of the DDP and model configurations that ``muon_overlap_dp_comm`` needs."""

_FOR_DTENSORS = {
    "fp16": "needs a loss scale, which with FSDP your training loop has (torch.amp.GradScaler)",
    "loss_scale": "with FSDP, your training loop has the loss scale (torch.amp.GradScaler)",
    "use_precision_aware_optimizer": "is not supported with FSDP",
    "optimizer_cuda_graph": "is not supported with FSDP",
    "overlap_param_gather_with_optimizer_step": "is not supported with FSDP",
}

_FOR_OWN_LOOPS = {"grad_norm_skip_threshold": "works with get_megatron_optimizer only"}

_OF_ITERATION = {
    "coefficient_type": "coefficients",
    "num_ns_steps": "steps",
    "fp32_matmul_prec": "precision",
}
"""Arguments of classes with a Newton-Schulz iteration, by their names in our own."""

_OF_ORTHOGONALIZATION = {
    "coefficients": "muon_coefficient_type",
    "steps": "muon_num_ns_steps",
    "backend": "muon_backend",
}
"""Fields of Muon, by the names that errors of its orthogonalization have."""

_KNOWN = ("emerging_optimizers.", "megatron_eopt.")
"""Packages whose classes check what their arguments are declared to be."""

_OF_THE_MAIN_MUON = {
    "muon_skip_grad_clip": False,
    "muon_momentum_dtype": "fp32",
    "muon_scalar_optimizer": "adam",
}
"""Defaults of fields that have an effect only if a Muon variant is the main optimizer."""

_OF_ANY_MUON = dict.fromkeys(("muon_lr", "muon_min_lr", "muon_weight_decay"))


def check_values(config: Any, optimizers: Collection[str]) -> None:
    """Raise an error if a field that applies to these optimizers has an unsupported value."""
    prefixes = {prefix for name in optimizers for prefix in prefixes_of(name)}
    for name in kinds_of(type(config)):
        if name not in CHOICES and name not in BOUNDS:
            continue
        # the value of a setting that no optimizer reads may be anything
        owners = {prefix for prefix in _OPTIMIZER_PREFIXES if name.startswith(f"{prefix}_")}
        in_use = not owners or not owners.isdisjoint(prefixes)
        value = getattr(config, name, None) if in_use else None
        if value is None:
            continue
        if name in CHOICES:
            check_choice(name, value, CHOICES[name])
        # infinity is the default, which turns it off; other numbers must be finite
        elif name != "grad_norm_skip_threshold" or value != math.inf:
            check_number(name, value, **BOUNDS[name])
    if config.fp16 and config.bf16:
        rule = "cannot be combined with bf16=True"
        raise ConfigurationError("fp16", True, rule, "Turn one of them off")
    if config.cautious_weight_decay:
        _refuse_cautious_decay(config, optimizers)
    if "muon" in prefixes:
        with naming(_OF_ORTHOGONALIZATION):
            resolve_coefficients(config.muon_coefficient_type, config.muon_num_ns_steps)
            # what "auto" means is decided later, by all ranks together
            if config.muon_backend != "auto":
                get_backend(config.muon_backend)
    for optimizer in set(optimizers) - set(STANDARD_OPTIMIZERS):
        cls = arguments_cls_of(optimizer)
        check_arguments(optimizer, set_arguments(cls, prefixes_of(optimizer), config))


def _refuse_cautious_decay(config: Any, optimizers: Iterable[str]) -> None:
    """Raise a ConfigurationError if an optimizer in use has no cautious weight decay."""
    check_cautious(CAUTIOUS_DECAY, decoupled=config.decoupled_weight_decay)
    for name in optimizers:
        is_standard = name in STANDARD_OPTIMIZERS
        known = {} if is_standard else constructor_parameters(arguments_cls_of(name))
        if name != "adam" and CAUTIOUS_DECAY not in known:
            rule = f"is for Muon, its variants and Adam, but {name} updates some parameters"
            raise ConfigurationError(CAUTIOUS_DECAY, True, rule, "Turn it off")


def check_arguments(
    optimizer: str, arguments: Mapping[str, tuple[str, Any]], checked: Collection[str] = ()
) -> None:
    """Raise a ConfigurationError if an optimizer's class cannot use the value of an argument.

    emerging-optimizers' classes know fewer values than our Muon, and would notice in a step.
    ``arguments`` have the field that sets each of them, and its value. Those that are ``checked``
    are looked at together with others only.
    """
    cls = arguments_cls_of(optimizer)
    parameters = constructor_parameters(cls)
    # what a user's own class does with its numbers is not known
    is_known = any(base.__module__.startswith(_KNOWN) for base in cls.__mro__)
    for name, parameter in parameters.items():
        if name not in arguments or name in checked:
            continue
        field, value = arguments[name]
        kind = type_of(parameter.annotation)
        # a rate may be set before the first step
        if is_known and not (name == "lr" and value is None):
            _check_argument(field, read_value(field, value, kind), BOUNDS.get(name, {}))
        elif kind.choices and value is not None:
            check_choice(field, value, kind.choices)
    # our Muon computes products that would diverge in float32 instead, and warns
    if not is_muon(optimizer) and parameters.keys() >= _OF_ITERATION.keys():
        defaults = {name: (name, parameters[name].default) for name in _OF_ITERATION}
        _check_iteration(optimizer, {**defaults, **arguments})


def _check_iteration(optimizer: str, arguments: Mapping[str, tuple[str, Any]]) -> None:
    """Raise a ConfigurationError if an optimizer's Newton-Schulz iteration would diverge."""
    coefficients, steps, precision = (arguments[name][1] for name in _OF_ITERATION)
    with naming({argument: arguments[name][0] for name, argument in _OF_ITERATION.items()}):
        schedule = resolve_coefficients(coefficients, steps)
        if sound_precision(schedule, precision) != precision:
            rule = f"diverges with precision={precision!r}, which {optimizer} uses"
            hint = "Set precision='highest', or use other coefficients"
            raise ConfigurationError("coefficients", coefficients, rule, hint)


def _check_argument(field: str, value: object, bounds: Mapping[str, float]) -> None:
    numbers = value if isinstance(value, tuple) else (value,)
    for index, number in enumerate(numbers):
        place = str(index + 1) if field.endswith("_beta") else f"[{index}]"
        if isinstance(number, float) or (bounds and number is not None):
            name = field + place if isinstance(value, tuple) else field
            check_number(name, number, **bounds)


def warn_of_unused(config: Any, main: str, optimizers: Collection[str]) -> None:
    """Log one warning that names the changed settings that no optimizer uses.

    ``optimizers`` are the names in use; ``main`` is the configuration's.
    """
    emerging = sorted(set(optimizers) - set(STANDARD_OPTIMIZERS))
    prefixes = tuple(dict.fromkeys(prefix for name in emerging for prefix in prefixes_of(name)))
    consumed: set[str] = set()
    for name in emerging:
        # an optimizer reads fields with its own prefixes only
        consumed |= consumed_fields(arguments_cls_of(name), prefixes_of(name))
        consumed |= consumed_by(name)
    unused = set(unconsumed(config, prefixes, consumed))
    for family, defaults in ((prefixes_of(main), _OF_THE_MAIN_MUON), (prefixes, _OF_ANY_MUON)):
        if "muon" not in family:
            unused |= {n for n, unset in defaults.items() if getattr(config, n, unset) != unset}
    if config.muon_use_syrk:
        unused.add("muon_use_syrk")  # constructors accept it, but do nothing with it
    if unused:
        values = ", ".join(f"{name}={getattr(config, name)!r}" for name in sorted(unused))
        names = " and ".join(sorted(optimizers))
        warn(logger, "these settings have no effect with %s, remove them: %s", names, values)


_PRINT = frozenset({"print_optimizer_routing"})
"""Fields that only print, which people set on one rank."""


def check_alike(config: Any) -> None:
    """Raise a ConfigurationError on all ranks if their configurations differ; collective."""
    # other values, such as timers and types, may differ as objects while they mean the same
    comparable = (int, float, str, tuple, type(None))
    mine = {
        name: value
        for name, value in sorted(vars(config).items())
        if isinstance(value, comparable) and name not in _PRINT
    }
    # before anything asks which kernels run
    kernels.agree(wanted=config.optimizer_kernels)
    if mine.get("muon_backend") == "auto":
        mine["muon_backend"] = automatic()
    if gpu.is_there():
        # with them, ranks would round otherwise
        mine |= {name: find_spec(name) is not None for name in PACKAGES}
    of_ranks = gather_objects(mine)
    for name in sorted({name for its in of_ranks for name in its}):
        # as text, because nan does not equal itself, and 1 equals True
        values = {repr(its.get(name)) for its in of_ranks}
        if len(values) > 1:
            rule = f"is not the same on all ranks: they have {sorted(values)}"
            hint = "Use the same configuration on all ranks and the same packages on all hosts"
            raise ConfigurationError(name, mine.get(name), rule, hint)


def refuse_for_matrices(config: Any) -> None:
    """Raise a ConfigurationError for the first mode that optimizers of matrices do not support."""
    for name, reason in _FOR_MATRICES.items():
        if getattr(config, name, False):
            rule = f"is not supported with this optimizer because it {reason}"
            raise ConfigurationError(name, True, rule, f"Set {name}=False")


def refuse_for_overlap(config: Any, parts: Iterable[Any] = (), *, is_served: bool = True) -> None:
    """Raise a ConfigurationError for the first setting that rules out ``muon_overlap_dp_comm``.

    ``parts`` are the configurations of DDP and of the model.
    """
    of_muon = "needs get_megatron_optimizer, optimizer='muon' and use_distributed_optimizer=True"
    rules = [] if is_served else [of_muon]
    wanted: list[tuple[Any, ...]] = [(config, *item) for item in _FOR_OVERLAP.items()]
    wanted += [(part, *item) for part in parts for item in _FOR_BUCKETS.items()]
    rules += [f"needs {n}={value!r}" for it, n, value in wanted if getattr(it, n, value) != value]
    if rules:
        hint = "Change that setting, or turn muon_overlap_dp_comm off"
        raise ConfigurationError("muon_overlap_dp_comm", True, rules[0], hint)


def refuse_for_qk_clip(config: Any, ddp_config: Any, *, hybrid: bool) -> None:
    """Raise a ConfigurationError for the first mode that QK-clip does not support.

    ``hybrid`` says whether megatron-core's hybrid optimizer would do the off-loading.
    """
    for name, reason in _FOR_QK_CLIP.items():
        is_on = getattr(config, name, False) or getattr(ddp_config, name, False)
        if is_on and (hybrid or name != "optimizer_cpu_offload"):
            rule = f"scales main and model weights in place, but {name} {reason}"
            raise ConfigurationError("qk_clip", True, rule, f"Set qk_clip=False or {name}=False")


def refuse_for_dtensors(config: Any, *, own_loop: bool) -> None:
    """Raise a ConfigurationError for the first field that FSDP or your own loop cannot support."""
    for name, rule in (_FOR_DTENSORS | (_FOR_OWN_LOOPS if own_loop else {})).items():
        value = getattr(config, name, None)
        # a threshold of 0 is set: it skips every step
        if value not in (None, math.inf) if name == "grad_norm_skip_threshold" else value:
            raise ConfigurationError(name, value, rule, f"Leave {name} unset")
