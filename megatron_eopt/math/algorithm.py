"""Choose the Newton-Schulz variant and precision for a matrix shape: accuracy first, then cost.

Accuracy: ``benchmarks.newton_schulz_accuracy`` measures the error of the standard and the Gram
iteration against float64, for each coefficient schedule and dtype (docs/reference/accuracy.md).
The table below records the result, and a test checks it:

* float32: a Gram variant is used if its error is at most :data:`FLOAT32_TOLERANCE` times the
  standard iteration's. Both are rounding noise, about 1e-6 on Gaussian matrices.
* 16 bits: a Gram variant is used if it is, in float16, at least as accurate as the standard
  iteration in bfloat16 on every spectrum tested.
* TF32 and schedules outside the table always use the standard iteration, which is more accurate
  with TF32 operands.
* A schedule that coarser rounding would make diverge (cans) is computed in float32 instead.

Cost in FLOPs, for ``m <= n`` and ``S`` steps: the standard iteration takes ``S (4 n/m + 2) m^3``,
the Gram iteration with ``r`` restarts ``(4 (r+1) n/m + 8 S - 6 (r+1)) m^3``.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from megatron_eopt.math.coefficients import Triple, is_stable, resolve_coefficients

AlgorithmT = Literal["auto", "standard", "gram"]
"""``auto`` uses the Gram iteration where it is cheaper and accurate enough."""

PrecisionT = Literal["highest", "high", "medium"]
"""``highest``: float32. ``high``: float32 with TF32 matrix products where the device has them.
``medium``: 16-bit operands with float32 accumulation: bfloat16 in the standard iteration, scaled
float16 in the Gram iteration."""

FLOAT32_TOLERANCE = 2.5
"""Largest accepted ratio of a float32 Gram variant's error to the standard iteration's."""

_ROUNDING: dict[PrecisionT, float] = {"high": 2.0**-10, "medium": 2.0**-7}
"""Spacing of numbers between 1 and 2: in TF32 (as in float16), and in bfloat16."""

# Restarts by coefficient set and number of steps.
_STUDIED: dict[Literal["float32", "16-bit"], dict[tuple[str, int], tuple[int, ...]]] = {
    "float32": {
        ("simple", 5): (3,),
        ("quintic", 5): (3,),
        ("polar_express", 5): (2, 3),
        ("polar_express", 8): (2, 3, 5),
        ("cans", 5): (2, 3),
        ("aol", 5): (3,),
        ("deepseekv4", 10): (3, 5, 7),
    },
    # In float16. Fewer restarts are faster but were less accurate where one column dominates, or
    # (deepseekv4) diverged on low rank. No variant of polar_express(5), cans or aol(4) passed.
    "16-bit": {
        ("simple", 5): (2, 3),
        ("quintic", 5): (2,),
        ("polar_express", 8): (2, 4),
        ("aol", 5): (2, 4),
        ("deepseekv4", 10): (3, 5, 7),
    },
}

_SMALLEST_16_BIT = 256  # shortest side in the 16-bit measurements; smaller matrices gain little
_WORTHWHILE = {"float32": 0.85, "16-bit": 0.9}
"""Share of the standard form's FLOPs that Gram's may take. What it saves must pay for element-wise
passes and small products; a GPU computes half of most 16-bit products, of which it has more."""


@dataclass(frozen=True)
class IterationPlan:
    """How matrices of one shape are orthogonalized."""

    algorithm: Literal["standard", "gram"]
    # steps, counted from 0, before which the Gram matrix is formed again; empty for standard
    restarts: tuple[int, ...]
    dtype: torch.dtype  # of the matrix products' operands

    def products(self, steps: int) -> int:
        """Return the number of products of the whole matrix with a small one in ``steps`` steps."""
        return len(self.restarts) + 1 if self.algorithm == "gram" else steps

    def stable(self, short_side: int) -> "IterationPlan":
        """Return the plan with float32 operands if it has 16-bit Gram products of a small matrix.

        Below the measured sizes, 16-bit rounding made eigenvalues negative, which led to nan.
        """
        small = self.algorithm == "gram" and short_side < _SMALLEST_16_BIT
        return replace(self, dtype=torch.float32) if small and self.dtype.itemsize == 2 else self


def standard_flops(m: int, n: int, steps: int = 5) -> int:
    """Return the FLOPs of the standard iteration on an ``m x n`` or ``n x m`` matrix."""
    m, n = sorted((m, n))
    return steps * (4 * n * m**2 + 2 * m**3)


def gram_flops(m: int, n: int, steps: int, restarts: int) -> int:
    """Return the FLOPs of the Gram iteration on an ``m x n`` or ``n x m`` matrix."""
    m, n = sorted((m, n))
    segments = restarts + 1
    return 4 * segments * n * m**2 + (8 * steps - 6 * segments) * m**3


@lru_cache(maxsize=4)
def _studied(width: Literal["float32", "16-bit"]) -> dict[tuple[Triple, ...], tuple[int, ...]]:
    """Return the table keyed by coefficient triples, since one schedule can have several names."""
    return {resolve_coefficients(*named): restarts for named, restarts in _STUDIED[width].items()}


@lru_cache(maxsize=4096)
def is_studied(shape: tuple[int, int], schedule: tuple[Triple, ...]) -> bool:
    """Return whether the 16-bit Gram iteration was found accurate for a shape and schedule."""
    return schedule in _studied("16-bit") and min(shape) >= _SMALLEST_16_BIT


def sound_precision(schedule: tuple[Triple, ...], precision: PrecisionT) -> PrecisionT:
    """Return the precision of matrix products: this one, or float32 if the schedule needs it."""
    return precision if is_stable(schedule, _ROUNDING.get(precision, 0.0)) else "highest"


@lru_cache(maxsize=4096)
def choose_algorithm(
    shape: tuple[int, int],
    dtype: torch.dtype,
    precision: PrecisionT,
    schedule: tuple[Triple, ...],
    algorithm: AlgorithmT = "auto",
) -> IterationPlan:
    """Choose the algorithm, restarts and operand dtype for matrices of one shape and input dtype.

    ``algorithm="standard"`` and ``"gram"`` are honoured even where they are slower or less
    accurate, ``precision`` unless the schedule diverges with it. ``shape`` is that of the whole
    logical matrix.
    """
    is_16_bit = sound_precision(schedule, precision) == "medium"
    operand = torch.bfloat16 if is_16_bit else torch.float32
    # float64 is the reference, so no precision setting changes it
    operand = dtype if dtype == torch.float64 else operand
    # TF32 has float16's mantissa: a Gram iteration that is asked for restarts as often
    coarse = precision != "highest"
    width: Literal["float32", "16-bit"] = "16-bit" if coarse else "float32"
    restarts = _studied(width).get(schedule)
    standard = IterationPlan("standard", (), operand)
    # see Note [Float16 range] of newton_schulz.py; bfloat16 has too few bits for Gram matrices
    operand = torch.float16 if operand == torch.bfloat16 else operand
    if algorithm == "standard":
        return standard
    if algorithm == "gram":
        # a schedule that was not measured restarts at every other step
        return IterationPlan("gram", restarts or tuple(range(2, len(schedule), 2)), operand)
    # the float64 reference stays textbook; with TF32 the Gram iteration is less accurate
    textbook = operand == torch.float64 or precision == "high"
    if restarts is None or textbook or (coarse and min(shape) < _SMALLEST_16_BIT):
        return standard
    # of FLOPs, not of time, so that all machines, and a dry run, decide alike
    cost = gram_flops(*shape, len(schedule), len(restarts))
    worthwhile = cost <= _WORTHWHILE[width] * standard_flops(*shape, len(schedule))
    return IterationPlan("gram", restarts, operand) if worthwhile else standard
