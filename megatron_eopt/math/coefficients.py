"""Coefficient schedules of the quintic Newton-Schulz iteration ``X <- (a I + b A + c A^2) X``.

``A = X X^T`` is the Gram matrix of the current iterate.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, cycle, islice, repeat

import numpy as np

from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_choice,
    check_integer,
)

Triple = tuple[float, float, float]
"""Coefficients ``(a, b, c)`` of one step."""

type CoefficientsLike = str | Sequence[float] | Sequence[Sequence[float]]
"""Name of a coefficient set, your own triple for all steps, or several, which steps use in turn."""

_SETS: dict[str, tuple[Triple, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    "deepseekv4": (*[(3.4445, -4.7750, 2.0315)] * 8, *[(2.0, -1.5, 0.5)] * 2),
}
"""The sets of emerging-optimizers, by the names that they have there.

They come from Keller Jordan's Muon (simple, quintic), arXiv:2505.16932 (polar_express, each divided
by a power of 1.01), arXiv:2506.10935 (cans), flash-newton-schulz (aol) and DeepSeek-V4.
"""

_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")
"""Sets that a longer iteration extends by their last triple; it begins the others again."""

KINDS = "the name of a set, or triples of numbers", "Give (a, b, c), or a list of such triples"
"""What coefficients must be, and what to do, for errors."""

DIVERGED = 1e3
"""A schedule that takes a singular value from (0, 1] beyond this counts as divergent."""

_SMALL = 1e-3  # a singular value whose sign a schedule of one's own must keep

_FLOAT32_ROUNDING = 2.0**-20  # of the norm, and of one step; products round to about 2^-23
_MOST_GROWTH = 2.0  # how much larger rounding may make a result

_OVERFLOWS = 1e50  # one more step could leave the range of Python's floats
_MOST_STEPS = 1000  # a larger number must be a typing error


def coefficient_names() -> tuple[str, ...]:
    """Return the names of the coefficient sets."""
    return tuple(_SETS)


def table(name: str) -> tuple[Triple, ...]:
    """Return the triples of a named set, without repetition."""
    return _SETS[name]


def own_triples(coefficients: object) -> tuple[Triple, ...] | None:
    """Return coefficients of one's own: a triple, or a sequence of triples; None if they are not.

    Numbers may be of any library.
    """
    try:
        rows = np.asarray(coefficients)
    # rows of different lengths, or numbers of other libraries that numpy does not read
    except (ValueError, TypeError, RuntimeError):
        return None
    is_triples = rows.ndim in (1, 2) and rows.shape[-1] == 3 and rows.size > 0
    if rows.dtype.kind not in "iuf" or not is_triples:
        return None
    return tuple((a, b, c) for a, b, c in rows.reshape(-1, 3).astype(float).tolist())


def resolve_coefficients(coefficients: CoefficientsLike, steps: int) -> tuple[Triple, ...]:
    """Expand a coefficient set to exactly one triple per step.

    A set with too few triples repeats its last one (polar_express, cans, deepseekv4) or starts
    again (all others, and your own), as in emerging-optimizers. One with too many is cut.

    Raises:
        ConfigurationError: If the name is unknown, ``steps`` is not within 1 to 1000, or your own
            set diverges on singular values in (0, 1], or does not keep small ones above 0.
        ConfigurationTypeError: If ``steps`` is not an integer, or ``coefficients`` are neither a
            name nor triples of numbers.
    """
    check_integer("steps", steps, at_most=_MOST_STEPS)
    if isinstance(coefficients, str):
        check_choice("coefficients", coefficients, coefficient_names())
        return _schedule(table(coefficients), steps, repeats_last=coefficients in _REPEAT_LAST)
    triples = own_triples(coefficients)
    if triples is None:
        raise ConfigurationTypeError("coefficients", coefficients, f"must be {KINDS[0]}", KINDS[1])
    schedule = _schedule(triples, steps)
    worst = largest(schedule, _FLOAT32_ROUNDING)
    # written so that nan is an error, too
    if not worst <= DIVERGED:
        rule = f"turns a singular value in (0, 1] into {worst:.3g} in {steps} steps: it diverges"
        hint = "Use fewer steps or other coefficients"
        raise ConfigurationError("coefficients", triples, rule, hint)
    small = response(schedule, _SMALL)
    if not small > 0:
        rule = f"turns a singular value of {_SMALL:g} into {small:.3g} in {steps} steps"
        hint = "Use coefficients that keep small singular values above 0, as a > 0 does"
        raise ConfigurationError("coefficients", triples, rule, hint)
    return schedule


def _schedule(
    triples: tuple[Triple, ...], steps: int, *, repeats_last: bool = False
) -> tuple[Triple, ...]:
    more = repeat(triples[-1]) if repeats_last else cycle(triples)
    return tuple(islice(chain(triples, more), steps))


def response(triples: Sequence[Triple], sigma: float) -> float:
    """Return what the schedule turns a singular value ``sigma`` into, in exact arithmetic."""
    for a, b, c in triples:
        square = sigma * sigma
        sigma = sigma * (a + square * (b + c * square))
        # also true for nan, which inf - inf gives
        if not abs(sigma) < _OVERFLOWS:
            return math.inf
    return sigma


def largest(triples: Sequence[Triple], rounding: float = 0.0) -> float:
    """Return the largest singular value that a schedule makes of singular values in [0, 1].

    The first iterate and every step's result may be too large by the factor ``1 + rounding``.
    """
    most = 1.0 + rounding
    for a, b, c in triples:
        # a x + b x^3 + c x^5 is extreme at the ends and where a + 3 b x^2 + 5 c x^4 is zero
        inner = [math.sqrt(root) for root in _roots(5 * c, 3 * b, a) if 0 < root < most**2]
        most = max(abs(response([(a, b, c)], x)) for x in (most, *inner)) * (1.0 + rounding)
        if not most < _OVERFLOWS:
            return math.inf
    return most


@lru_cache(maxsize=256)
def is_stable(triples: tuple[Triple, ...], rounding: float) -> bool:
    """Return whether results with rounding errors of this size are about as large as exact ones.

    Some schedules (cans) map values slightly above 1 far away, and then diverge on matrices with
    one large singular value.
    """
    return largest(triples, rounding) <= _MOST_GROWTH * max(1.0, largest(triples))


def _roots(a: float, b: float, c: float) -> list[float]:
    """Return the real roots of ``a x^2 + b x + c``."""
    if a == 0:
        return [-c / b] if b else []
    discriminant = b * b - 4 * a * c
    if not discriminant >= 0:
        return []
    # the larger root in size, without cancellation, and the other from their product c / a
    larger = -(b + math.copysign(math.sqrt(discriminant), b)) / 2
    return [larger / a, c / larger if larger else 0.0]
