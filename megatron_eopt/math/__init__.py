"""Orthogonalization of matrices in plain torch: no Megatron, tensors and numbers in and out.

``orthogonalize`` is the entry; the rest is the vocabulary its arguments use.
"""

from megatron_eopt.math.algorithm import (
    AlgorithmT,
    Plan,
    choose_algorithm,
    gram_flops,
    standard_flops,
)
from megatron_eopt.math.backends import Backend, backend_names, get_backend, register_backend
from megatron_eopt.math.coefficients import (
    CoefficientsLike,
    CoefficientT,
    Triple,
    resolve_coefficients,
)
from megatron_eopt.math.finite import NonFiniteError, check_finite, suspicion
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.orthogonalize import DEFAULT_EPS, orthogonalize
from megatron_eopt.math.precision import PrecisionT, check_precision, matmul_precision
from megatron_eopt.math.scaling import SCALE_MODES, ScaleModeT, scale_factor

__all__ = [
    "DEFAULT_EPS",
    "SCALE_MODES",
    "AlgorithmT",
    "Backend",
    "CoefficientT",
    "CoefficientsLike",
    "NonFiniteError",
    "Plan",
    "PrecisionT",
    "ReduceT",
    "ScaleModeT",
    "Triple",
    "backend_names",
    "check_finite",
    "check_precision",
    "choose_algorithm",
    "get_backend",
    "gram_flops",
    "matmul_precision",
    "orthogonalize",
    "register_backend",
    "resolve_coefficients",
    "scale_factor",
    "standard_flops",
    "suspicion",
]
