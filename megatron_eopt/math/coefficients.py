"""Coefficient schedules of the quintic Newton-Schulz iteration ``X <- (a I + b A + c A^2) X``.

The numbers come from emerging-optimizers, which names their sources; this file only decides which
triple serves which step. ``A`` is the Gram matrix ``X X^T`` of the current iterate.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, cast, get_args

from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_choice,
    check_number,
)

CoefficientT = Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"]
"""Names of the coefficient sets that emerging-optimizers ships."""

Triple = tuple[float, float, float]
"""One step's ``(a, b, c)``."""

CoefficientsLike = CoefficientT | Sequence[Sequence[float]]
"""A set by name, or the triples of a set of your own."""

COEFFICIENT_NAMES: tuple[CoefficientT, ...] = get_args(CoefficientT)

# The sets whose last triple is a fixed-point polish; running them longer means polishing longer.
# emerging-optimizers keeps this list inside a function, so a test compares behaviour instead.
REPEATS_LAST: frozenset[str] = frozenset({"polar_express", "cans", "deepseekv4"})

# Beyond this a singular value in (0, 1] is not being orthogonalized but lost.
_DIVERGED = 1e3


def table(name: CoefficientT) -> tuple[Triple, ...]:
    """Return the triples of a named set, one period of its schedule."""
    check_choice("coefficients", name, COEFFICIENT_NAMES)
    triples = cast(Sequence[Triple], muon_utils._COEFFICIENT_SETS[name])
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)


def resolve_coefficients(coefficients: CoefficientsLike, steps: int) -> tuple[Triple, ...]:
    """Turn a coefficient set into exactly one triple per step.

    Schedules longer than their set repeat the last triple (polar_express, cans, deepseekv4) or
    start again (all others, and sets of your own); shorter ones are cut.

    Raises:
        ConfigurationError: If the name is unknown, a number is not finite, ``steps`` is below 1,
            or a set of your own diverges on singular values in (0, 1].
        ConfigurationTypeError: If ``steps`` is not an integer or a triple is not three numbers.
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise ConfigurationTypeError("steps", steps, "must be an integer", "Give a whole number")
    check_number("steps", steps, at_least=1)
    if isinstance(coefficients, str):
        return _resolve_named(coefficients, steps)
    return _resolve_custom(_checked_triples(coefficients), steps)


@lru_cache(maxsize=256)
def _resolve_named(name: CoefficientT, steps: int) -> tuple[Triple, ...]:
    mode: Literal["cycle", "repeat_last"] = "repeat_last" if name in REPEATS_LAST else "cycle"
    return tuple(muon_utils.get_coefficient_iterator(steps, table(name), mode=mode))


@lru_cache(maxsize=256)
def _resolve_custom(triples: tuple[Triple, ...], steps: int) -> tuple[Triple, ...]:
    schedule = tuple(muon_utils.get_coefficient_iterator(steps, triples, mode="cycle"))
    worst = max(abs(response(schedule, grid / 256)) for grid in range(1, 257))
    if not worst <= _DIVERGED:
        where = f"every singular value in (0, 1] bounded over {steps} steps"
        rule = f"must keep {where}, and sends one to {worst:.3g}"
        way_out = "Give fewer steps or other coefficients"
        raise ConfigurationError("coefficients", triples, rule, way_out)
    return schedule


def response(triples: Sequence[Triple], sigma: float) -> float:
    """Return where the schedule sends a singular value ``sigma`` (in exact arithmetic)."""
    for a, b, c in triples:
        square = sigma * sigma
        sigma = sigma * (a + square * (b + c * square))
        # a diverging value would overflow Python's floats
        if not abs(sigma) < 1e100:
            return float("inf")
    return sigma


def _checked_triples(coefficients: object) -> tuple[Triple, ...]:
    if not isinstance(coefficients, Sequence):
        rule = "must be the name of a set or a sequence of (a, b, c)"
        way_out = f"Give one of {', '.join(COEFFICIENT_NAMES)} or a list of triples"
        raise ConfigurationTypeError("coefficients", coefficients, rule, way_out)
    if not coefficients:
        rule = "must hold at least one triple"
        raise ConfigurationError("coefficients", coefficients, rule, "Give one (a, b, c)")
    for triple in coefficients:
        if not isinstance(triple, Sequence) or isinstance(triple, str) or len(triple) != 3:
            rule = "every entry must be three numbers"
            raise ConfigurationTypeError("coefficients", triple, rule, "Give (a, b, c)")
        for number in triple:
            check_number("coefficients", number)
    return tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
