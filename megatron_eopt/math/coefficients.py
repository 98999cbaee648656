"""Coefficient schedules of the quintic Newton-Schulz iteration ``X <- (a I + b A + c A^2) X``.

``A = X X^T`` is the Gram matrix of the current iterate. The sets come from emerging-optimizers,
which cites their sources.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_choice,
    check_integer,
)
from megatron_eopt.base.upstream import require_upstream

Triple = tuple[float, float, float]
"""Coefficients ``(a, b, c)`` of one step."""

type CoefficientsLike = str | Sequence[float] | Sequence[Sequence[float]]
"""Name of a coefficient set, your own triple for all steps, or several, which steps use in turn."""

# Sets that emerging-optimizers' iteration extends by their last triple; it cycles the others.
_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")

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
    """Return the names of emerging-optimizers' coefficient sets."""
    return tuple(require_upstream("_COEFFICIENT_SETS"))


def table(name: str) -> tuple[Triple, ...]:
    """Return the triples of a named set, without repetition."""
    rows = require_upstream("_COEFFICIENT_SETS")[name]
    return tuple((float(a), float(b), float(c)) for a, b, c in rows)


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
        mode = "repeat_last" if coefficients in _REPEAT_LAST else "cycle"
        return _schedule(table(coefficients), steps, mode)
    triples = own_triples(coefficients)
    if triples is None:
        raise ConfigurationTypeError("coefficients", coefficients, f"must be {KINDS[0]}", KINDS[1])
    schedule = _schedule(triples, steps, "cycle")
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


def _schedule(triples: tuple[Triple, ...], steps: int, mode: str) -> tuple[Triple, ...]:
    # upstream's own rule of repetition, so that names mean the same in both packages
    return tuple(require_upstream("get_coefficient_iterator")(steps, triples, mode=mode))


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
