"""Coefficient schedules of the quintic Newton-Schulz iteration ``X <- (a I + b A + c A^2) X``.

The names and numbers come from emerging-optimizers, which names their sources; this file only
decides which triple serves which step. ``A`` is the Gram matrix ``X X^T`` of the current iterate.
"""

from collections.abc import Sequence
from functools import lru_cache

from megatron_eopt.base.errors import ConfigurationError, check_choice, check_integer
from megatron_eopt.base.upstream import needed

Triple = tuple[float, float, float]
"""One step's ``(a, b, c)``."""

CoefficientsLike = str | Sequence[Sequence[float]]
"""A set by name, or the triples of a set of your own."""

# As decided inside of emerging-optimizers' iteration: the others start again.
_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")

DIVERGED = 1e3
"""Beyond this a singular value in (0, 1] is not being orthogonalized but lost."""

# A typing error, which would take the memory for as many triples.
_MOST_STEPS = 1000


def coefficient_names() -> tuple[str, ...]:
    """Return the names of the coefficient sets that emerging-optimizers ships."""
    return tuple(needed("_COEFFICIENT_SETS"))


def table(name: str) -> tuple[Triple, ...]:
    """Return the triples of a named set, one period of its schedule."""
    check_choice("coefficients", name, coefficient_names())
    rows = needed("_COEFFICIENT_SETS")[name]
    return tuple((float(a), float(b), float(c)) for a, b, c in rows)


def check_steps(argument: str, steps: object) -> None:
    """Raise unless ``steps`` is a number of iterations; ``argument`` is the user's word for it."""
    check_integer(argument, steps, at_most=_MOST_STEPS)


def resolve_coefficients(
    coefficients: CoefficientsLike, steps: int, argument: str = "coefficients"
) -> tuple[Triple, ...]:
    """Turn a coefficient set into exactly one triple per step.

    Schedules longer than their set repeat the last triple (polar_express, cans, deepseekv4) or
    start again (most others, and sets of your own), as emerging-optimizers does; shorter ones are
    cut. ``argument`` is the user's word for the set.

    Raises:
        ConfigurationError: If the name is unknown, ``steps`` is below 1 or above 1000, or a set of
            your own diverges on singular values in (0, 1].
        ConfigurationTypeError: If ``steps`` is not an integer.
    """
    check_steps("steps", steps)
    if isinstance(coefficients, list | tuple) and coefficients:
        triples = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
        return _resolve_custom(triples, steps, argument)
    check_choice(argument, coefficients, coefficient_names())
    return _resolve_named(str(coefficients), steps)


@lru_cache(maxsize=256)
def _resolve_named(name: str, steps: int) -> tuple[Triple, ...]:
    return _schedule(table(name), steps, "repeat_last" if name in _REPEAT_LAST else "cycle")


def _schedule(triples: tuple[Triple, ...], steps: int, mode: str) -> tuple[Triple, ...]:
    return tuple(needed("get_coefficient_iterator")(steps, triples, mode=mode))


@lru_cache(maxsize=256)
def _resolve_custom(triples: tuple[Triple, ...], steps: int, argument: str) -> tuple[Triple, ...]:
    schedule = _schedule(triples, steps, "cycle")
    worst = max(abs(response(schedule, grid / 256)) for grid in range(1, 257))
    if not worst <= DIVERGED:
        where = f"every singular value in (0, 1] bounded over {steps} steps"
        rule = f"must keep {where}, and sends one to {worst:.3g}"
        way_out = "Give fewer steps or other coefficients"
        raise ConfigurationError(argument, triples, rule, way_out)
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
