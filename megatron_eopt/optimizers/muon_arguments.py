"""What the arguments of :class:`.muon.TensorParallelMuon` may be."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import torch
from emerging_optimizers.orthogonalized_optimizers import OrthogonalizedOptimizer
from torch import Tensor

from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_choice,
    check_number,
    check_switch,
)
from megatron_eopt.base.names import SMALLEST_WAVE_MB, TpModeT
from megatron_eopt.math.algorithm import ALGORITHMS
from megatron_eopt.math.backends import on_syrk
from megatron_eopt.math.coefficients import check_steps, resolve_coefficients
from megatron_eopt.math.low_precision import MOMENTUM_DTYPES
from megatron_eopt.math.orthogonalize import SMALLEST_EPS, Orthogonalization
from megatron_eopt.math.precision import FLOAT_DTYPES, PRECISIONS
from megatron_eopt.math.scaling import SCALE_MODES
from megatron_eopt.matrices import Split, qkv, whole
from megatron_eopt.optimizers.driver import ParamGroup
from megatron_eopt.optimizers.muon_arithmetic import WEIGHT_DECAY_METHODS, WeightDecayT

_BOUNDS: dict[str, dict[str, float]] = {
    "lr": {"at_least": 0},
    "momentum": {"at_least": 0, "below": 1},
    "weight_decay": {"at_least": 0},
    "beta2": {"at_least": 0, "below": 1},
    "eps": {"above": 0},
}
"""Bounds of what parameter groups may have of their own."""

READ_ONCE = frozenset(
    {
        "bias_correction",
        "fp32_matmul_prec",
        "is_qkv_fn",
        "moment2_method",
        "nesterov",
        "orthogonalization",
        "pg_collection",
        "qkv_split_shapes",
        "split_qkv",
        "tp_mode",
        "weight_decay_method",
    }
)
"""Attributes that steps do not look at."""

BATCHED = (
    "is not called in a step, which takes matrices of equal shape together",
    "Override orthogonalize(p, grad) in a subclass",
)
"""Why a way to orthogonalize one matrix is refused, and the way out."""

UNCALLED = {
    "scaled_orthogonalize_fn_with_gtp_remat": BATCHED,
    "_apply_weight_decay_inplace": (
        "is not called, since weights of a group decay together",
        "Choose a weight_decay_method, or override pre_weight_update_fn_inplace",
    ),
}
"""What megatron-core and emerging-optimizers call in a step, and ours do not."""


def check_switches(**switches: object) -> None:
    """Raise a ConfigurationTypeError unless all are True or False."""
    for name, value in switches.items():
        check_switch(name, value)


def check_subclass(cls: type) -> None:
    """Raise a ConfigurationError if a class overrides what a step does not call."""
    for name, (rule, way_out) in UNCALLED.items():
        if getattr(cls, name, None) is not getattr(OrthogonalizedOptimizer, name, None):
            raise ConfigurationError(f"{cls.__name__}.{name}", "overridden", rule, way_out)


def declared_split(optimizer: Any, param: Tensor, shape: tuple[int, ...], name: str = "") -> Split:
    """Return the logical matrices of a parameter, as it and the optimizer that steps it say.

    An optimizer says it as Muon does here and in megatron-core: ``split_qkv``, ``is_qkv_fn`` and
    ``qkv_split_shapes``. One without these says nothing.

    Raises:
        ConfigurationError: If it is fused and how it is put together is not known.
    """
    declared = getattr(param, "eopt_split", None)
    if isinstance(declared, Split):
        return declared
    is_split = getattr(optimizer, "split_qkv", False) and optimizer.is_qkv_fn(param)
    if declared == "whole" or not is_split:
        return whole(shape)
    rows = getattr(param, "qkv_split_shapes", None) or optimizer.qkv_split_shapes
    if not rows:
        rule = f"must say how the fused weight {name!r} of shape {shape} is put together"
        way_out = "Give the rows of Q, K and V in one query group"
        raise ConfigurationError("qkv_split_shapes", rows, rule, way_out)
    return qkv(shape, rows)


def check_fused(is_qkv_fn: object, qkv_split_shapes: Any, splits: object) -> None:
    """Raise unless what tells fused weights is of the right kind.

    Raises:
        ConfigurationTypeError: If an argument is of another kind.
    """
    if is_qkv_fn is not None and not callable(is_qkv_fn):
        rule = "must tell whether a parameter is a fused Q, K and V"
        raise ConfigurationTypeError("is_qkv_fn", is_qkv_fn, rule, "Give a function, or None")
    shapes = () if qkv_split_shapes is None else qkv_split_shapes
    if not (isinstance(shapes, Iterable) and all(map(_is_count, shapes))):
        rule = "must be the rows of Q, K and V in one query group"
        way_out = "Give integers above 0, or None"
        raise ConfigurationTypeError("qkv_split_shapes", qkv_split_shapes, rule, way_out)
    if splits is not None and not (
        isinstance(splits, Mapping)
        and all(isinstance(param, Tensor) for param in splits)
        and all(isinstance(split, Split | None) for split in splits.values())
    ):
        rule = "must say of parameters how they are put together"
        way_out = "Give a dict from parameters to Split or None, or None"
        raise ConfigurationTypeError("splits", splits, rule, way_out)


def check_kept(check_finite: object, wave_mb: object, momentum_dtype: object) -> None:
    """Raise unless the rest of what no arithmetic depends on is as the class takes it."""
    if check_finite is not None:
        check_switch("check_finite", check_finite)
    check_number("wave_mb", wave_mb, at_least=SMALLEST_WAVE_MB)
    check_choice("momentum_dtype", momentum_dtype, MOMENTUM_DTYPES)


def weight_decay_method_of(decoupled: bool, method: WeightDecayT | None) -> WeightDecayT:
    """Return how weights decay: ``method``, or what upstream's switch says if it is None."""
    check_switch("use_decoupled_weight_decay", decoupled)
    if method is None:
        return "decoupled" if decoupled else "l2"
    check_choice("weight_decay_method", method, WEIGHT_DECAY_METHODS)
    return method


def orthogonalization_of(**settings: Any) -> Orthogonalization:
    """Return the arithmetic, having checked the settings under the names of the arguments."""
    steps, tp_mode, use_syrk = (settings.pop(key) for key in ("steps", "tp_mode", "use_syrk"))
    check_choice("tp_mode", tp_mode, get_args(TpModeT))
    check_steps("num_ns_steps", steps)
    resolve_coefficients(settings["coefficients"], steps, "coefficient_type")
    check_choice("scale_mode", settings["scale_mode"], SCALE_MODES)
    check_number("extra_scale_factor", settings["extra_scale_factor"], above=0)
    check_choice("fp32_matmul_prec", settings["precision"], PRECISIONS)
    check_choice("algorithm", settings["algorithm"], ALGORITHMS)
    check_number("ns_eps", settings["eps"], at_least=SMALLEST_EPS)
    if use_syrk:
        whole = tp_mode != "distributed"
        settings["backend"] = on_syrk(settings["backend"], settings["precision"], whole=whole)
    return Orthogonalization(steps=steps, **settings)


def check_group(optimizer_cls: type, own: Iterable[str], group: ParamGroup) -> None:
    """Raise unless a parameter group has what can be its own, within bounds, and nothing twice.

    Args:
        optimizer_cls: The class of the optimizer; its other arguments hold for all groups.
        own: Arguments that a group may have of its own.
        group: The group.
    """
    check_numbers(group)
    of_all = inspect.signature(optimizer_cls).parameters.keys() - {*own, "params"}
    for name in sorted(of_all & group.keys()):
        rule = "holds for all parameter groups of one optimizer"
        way_out = "Give it to the constructor, or make two optimizers"
        raise ConfigurationError(name, group[name], rule, way_out)
    if (twice := len(group["params"]) - len(set(group["params"]))) > 0:
        rule = "a parameter stands twice in one group, and would be stepped twice"
        raise ConfigurationError("params", f"{twice} of them", rule, "Give every parameter once")


def check_numbers(group: Mapping[str, Any]) -> None:
    """Raise unless the numbers of a parameter group are within their bounds."""
    for name, bounds in _BOUNDS.items():
        if name in group:
            check_number(name, group[name], **bounds)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_matrix(name: str, param: Tensor) -> None:
    """Raise a ConfigurationError unless a parameter is one matrix, or one for each expert."""
    shape = tuple(param.shape)
    if len(shape) not in (2, 3) or 0 in shape:
        rule = "Muon needs shapes (out, in) or (experts, out, in) without a size of 0"
        way_out = "Give other parameters to an element-wise optimizer"
        raise ConfigurationError(name, shape, rule, way_out)
    if param.dtype not in FLOAT_DTYPES or param.layout != torch.strided:
        kind = param.dtype if param.layout == torch.strided else param.layout
        rule = "Muon needs dense matrices of float64, float32, bfloat16 or float16"
        raise ConfigurationError(name, kind, rule, "Convert it, or leave it to another optimizer")
