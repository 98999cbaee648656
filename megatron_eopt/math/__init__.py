"""Orthogonalization of matrices with the Newton-Schulz iteration, in plain torch without Megatron.

:func:`orthogonalize` is the entry point; the other names are what its arguments need.
Whoever adds a back end, a kernel or coefficients reads no other room.
"""

from megatron_eopt.math import kernel_checks as _kernel_checks  # noqa: F401  registers cases
from megatron_eopt.math.algorithm import (
    AlgorithmT,
    IterationPlan,
    PrecisionT,
    choose_algorithm,
    sound_precision,
    standard_flops,
)
from megatron_eopt.math.backends import Backend, backend_names, get_backend, register_backend
from megatron_eopt.math.coefficients import coefficient_names, resolve_coefficients
from megatron_eopt.math.orthogonalize import (
    Orthogonalization,
    orthogonalize,
    scale_factor,
)

__all__ = [
    "AlgorithmT",
    "Backend",
    "IterationPlan",
    "Orthogonalization",
    "PrecisionT",
    "backend_names",
    "choose_algorithm",
    "coefficient_names",
    "get_backend",
    "orthogonalize",
    "register_backend",
    "resolve_coefficients",
    "scale_factor",
    "sound_precision",
    "standard_flops",
]
