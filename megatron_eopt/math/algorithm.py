"""Which iteration serves a matrix, in which precision: where cost and accuracy decide.

Accuracy comes first. ``benchmarks.newton_schulz_accuracy`` measures, for each coefficient schedule
and dtype, the error of the standard and of the Gram iteration against float64 on named spectra
(docs/explanation/numerics.md). The two tables below are its outcome, and a test checks them:

* float32: a Gram form is taken if its error is at most :data:`FLOAT32_TOLERANCE` times the standard
  iteration's; both are rounding noise, about 1e-6 on Gaussian matrices.
* 16 bits: only if it, in float16, is at least as accurate as the standard iteration, in bfloat16,
  on every named spectrum.
* Schedules outside the tables stay standard, and so does TF32: with as coarse operands the standard
  iteration is the more accurate one.

Cost is FLOPs. With ``m <= n`` and ``S`` steps the standard iteration takes ``S (4 n/m + 2) m^3``,
Gram's with ``r`` restarts ``(4 (r+1) n/m + 8 S - 6 (r+1)) m^3``.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from megatron_eopt.math.coefficients import Triple, resolve_coefficients

AlgorithmT = Literal["auto", "standard", "gram"]
"""``auto`` takes the Gram iteration where it is cheaper and accurate enough."""

PrecisionT = Literal["highest", "high", "medium"]
"""``highest``: float32; ``high``: float32 storage with TF32 products where the device has them;
``medium``: operands of 16 bits with float32 accumulation, bfloat16 in the standard iteration and
float16 in Gram's, which scales them."""

FLOAT32_TOLERANCE = 2.5
"""How much larger than the standard iteration's error a float32 Gram form's may be."""

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
    # In float16. Fewer restarts are faster and were less accurate where one column holds nearly
    # all, or (deepseekv4) diverged on low rank; so were all forms of polar_express with 5 steps,
    # cans and aol with 4.
    "16-bit": {
        ("simple", 5): (2, 3),
        ("quintic", 5): (2,),
        ("polar_express", 8): (2, 4),
        ("aol", 5): (2, 4),
        ("deepseekv4", 10): (3, 5, 7),
    },
}

# The 16-bit study covers matrices from this short side on; smaller ones gain little.
_SMALLEST_16_BIT = 256

# Gram's element-wise passes and smaller products cost time that FLOPs do not show.
_WORTHWHILE = 0.85


@dataclass(frozen=True)
class Plan:
    """How one shape is computed."""

    algorithm: Literal["standard", "gram"]
    # steps, counted from 0, that start on a fresh Gram matrix; empty for standard
    restarts: tuple[int, ...]
    dtype: torch.dtype  # of the matrix products' operands

    def products(self, steps: int) -> int:
        """Return how often the whole matrix is multiplied by a small one in so many steps."""
        return len(self.restarts) + 1 if self.algorithm == "gram" else steps

    def stable(self, short_side: int) -> "Plan":
        """Return it with float32 operands where the Gram form was asked for below the study.

        Rounding of 16 bits made eigenvalues of small matrices negative, and nan of them.
        """
        small = self.algorithm == "gram" and short_side < _SMALLEST_16_BIT
        return replace(self, dtype=torch.float32) if small and self.dtype.itemsize == 2 else self


def standard_flops(m: int, n: int, steps: int = 5) -> int:
    """Return the FLOPs of the standard iteration on an ``m x n`` matrix, either side longer."""
    m, n = sorted((m, n))
    return steps * (4 * n * m**2 + 2 * m**3)


def gram_flops(m: int, n: int, steps: int, restarts: int) -> int:
    """Return the FLOPs of the Gram iteration on an ``m x n`` matrix, either side longer."""
    m, n = sorted((m, n))
    segments = restarts + 1
    return 4 * segments * n * m**2 + (8 * steps - 6 * segments) * m**3


@lru_cache(maxsize=4)
def _studied(width: Literal["float32", "16-bit"]) -> dict[tuple[Triple, ...], tuple[int, ...]]:
    """Key the table by the triples themselves: equal schedules have several names."""
    return {resolve_coefficients(*named): restarts for named, restarts in _STUDIED[width].items()}


def is_studied(shape: tuple[int, int], schedule: tuple[Triple, ...]) -> bool:
    """Return whether 16 bits were found accurate for a schedule on matrices of a size."""
    return schedule in _studied("16-bit") and min(shape) >= _SMALLEST_16_BIT


@lru_cache(maxsize=4096)
def choose_algorithm(
    shape: tuple[int, int],
    dtype: torch.dtype,
    precision: PrecisionT,
    schedule: tuple[Triple, ...],
    algorithm: AlgorithmT = "auto",
) -> Plan:
    """Decide how whole logical matrices of one shape and dtype are orthogonalized.

    ``standard`` and ``gram`` are taken at their word, even where slower or less accurate.
    """
    operand = torch.bfloat16 if precision == "medium" else torch.float32
    # float64 stays what it is whatever the precision, as the reference of the others
    operand = dtype if dtype == torch.float64 else operand
    coarse = precision != "highest"
    restarts = _studied("16-bit" if coarse else "float32").get(schedule)
    standard = Plan("standard", (), operand)
    operand = torch.float16 if operand == torch.bfloat16 else operand
    if algorithm == "standard":
        return standard
    if algorithm == "gram":
        # outside the study every other step starts anew
        return Plan("gram", restarts or tuple(range(2, len(schedule), 2)), operand)
    # the reference stays with the textbook, and TF32 would be the less accurate for it
    textbook = operand == torch.float64 or precision == "high"
    if restarts is None or textbook or (coarse and min(shape) < _SMALLEST_16_BIT):
        return standard
    cost = gram_flops(*shape, len(schedule), len(restarts))
    worthwhile = cost <= _WORTHWHILE * standard_flops(*shape, len(schedule))
    return Plan("gram", restarts, operand) if worthwhile else standard
