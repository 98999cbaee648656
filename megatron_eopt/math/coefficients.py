"""Coefficient schedules of the quintic Newton-Schulz iteration ``X <- (a I + b A + c A^2) X``.

``A = X X^T`` is the Gram matrix of the current iterate. The sets come from emerging-optimizers,
which cites their sources.
"""

from collections.abc import Sequence

from megatron_eopt.base.errors import ConfigurationError, check_choice, check_integer
from megatron_eopt.base.upstream import needed

Triple = tuple[float, float, float]
"""Coefficients ``(a, b, c)`` of one step."""

CoefficientsLike = str | Sequence[Sequence[float]]
"""Name of a coefficient set, or your own triples."""

# Sets that emerging-optimizers' iteration extends by their last triple; it cycles the others.
_REPEAT_LAST = ("polar_express", "cans", "deepseekv4")

DIVERGED = 1e3
"""A schedule that takes a singular value from (0, 1] beyond this counts as divergent."""

_MOST_STEPS = 1000  # a larger number must be a typing error


def coefficient_names() -> tuple[str, ...]:
    """Return the names of emerging-optimizers' coefficient sets."""
    return tuple(needed("_COEFFICIENT_SETS"))


def table(name: str) -> tuple[Triple, ...]:
    """Return the triples of a named set, without repetition."""
    rows = needed("_COEFFICIENT_SETS")[name]
    return tuple((float(a), float(b), float(c)) for a, b, c in rows)


def check_steps(argument: str, steps: object) -> None:
    """Raise unless ``steps`` is a valid number of iterations; messages call it ``argument``."""
    check_integer(argument, steps, at_most=_MOST_STEPS)


def resolve_coefficients(
    coefficients: CoefficientsLike, steps: int, argument: str = "coefficients"
) -> tuple[Triple, ...]:
    """Expand a coefficient set to exactly one triple per step.

    A set with too few triples repeats its last one (polar_express, cans, deepseekv4) or starts
    again (all others, and your own), as in emerging-optimizers. One with too many is cut.
    ``argument`` is the set's name in error messages.

    Raises:
        ConfigurationError: If the name is unknown, ``steps`` is not within 1 to 1000, or your own
            set diverges on singular values in (0, 1].
        ConfigurationTypeError: If ``steps`` is not an integer.
    """
    check_steps("steps", steps)
    if not isinstance(coefficients, list | tuple) or not coefficients:
        check_choice(argument, coefficients, coefficient_names())
        name = str(coefficients)
        return _schedule(table(name), steps, "repeat_last" if name in _REPEAT_LAST else "cycle")
    triples = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    schedule = _schedule(triples, steps, "cycle")
    worst = max(abs(response(schedule, grid / 256)) for grid in range(1, 257))
    if not worst <= DIVERGED:
        rule = f"turns a singular value in (0, 1] into {worst:.3g} in {steps} steps: it diverges"
        way_out = "Use fewer steps or other coefficients"
        raise ConfigurationError(argument, triples, rule, way_out)
    return schedule


def _schedule(triples: tuple[Triple, ...], steps: int, mode: str) -> tuple[Triple, ...]:
    return tuple(needed("get_coefficient_iterator")(steps, triples, mode=mode))


def response(triples: Sequence[Triple], sigma: float) -> float:
    """Return what the schedule turns a singular value ``sigma`` into, in exact arithmetic."""
    for a, b, c in triples:
        square = sigma * sigma
        sigma = sigma * (a + square * (b + c * square))
        # stop before Python's floats overflow
        if not abs(sigma) < 1e100:
            return float("inf")
    return sigma
