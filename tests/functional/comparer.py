"""Whether two runs are the same, metric by metric.

Tolerances are relative to the expected value. Losses are printed with seven digits, norms with
three decimals; a norm may besides differ by one in the last decimal, since it is rounded.

Where two runs need not agree to the bit, because they sum in different orders (on another machine,
in another storage or layout), their tolerance follows from a measured spread: how far each value
moves if the last bits of all sums are moved, see :mod:`tests.harness.last_bits`.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

from tests.functional.metrics import METRICS, Metrics, first_values

type Tolerances = Mapping[str, float | Sequence[float]]
"""Largest relative differences by metric: one for all values, or one for each."""

FACTOR = 4.0
"""What is allowed, in spreads. A spread is the largest of some differences with heavy tails: where
steps are signs, most last bits change nothing, and a few change a step."""

LARGEST = 1e-2
"""Of a loss's tolerance. Six steps lower it by about 15 per cent; what may stray by more than a
fifteenth of that, times the factor, says nothing about the run."""

UNBOUNDED = 1.0
"""A spread that says no more than that last bits decide, however far they lead."""

EXACT = {"learning rate": 0.0, "skipped": 0.0, "nan": 0.0}
"""Schedules and counts do not depend on rounding."""

AS_PRINTED = dict.fromkeys(METRICS, 0.0) | {"lm loss": 1e-6, "validation loss": 1e-6}
"""Where all is the same but for the print: the loss of a process's second step is taken out of a
printed mean, which costs a digit."""

ROUNDING = {"grad norm": 1.01e-3, "params norm": 1.01e-3}
"""One in the last printed decimal."""

RESUME = {**dict.fromkeys(METRICS, 0.0), "lm loss": AS_PRINTED["lm loss"]}
"""Going on is the same arithmetic on the same numbers."""


def spread_of(plain: Metrics, others: Iterable[Metrics]) -> dict[str, list[float]]:
    """Return how far a run strays with other last bits, from step to step never less.

    That is the largest relative difference up to each value, at most UNBOUNDED, by metric. Raises
    ValueError if one of the others has another schedule, or skips other steps.
    """
    spread = {name: [0.0] * len(plain[name]) for name in METRICS if name not in EXACT}
    for other in others:
        for name in EXACT:
            if plain[name] != other[name]:
                raise ValueError(f"{name} changes with last bits: {plain[name]}, {other[name]}")
        for name, largest in spread.items():
            strays = [_relative(*pair) for pair in zip(plain[name], other[name], strict=True)]
            strays = [stray if stray < UNBOUNDED else UNBOUNDED for stray in strays]  # nan too
            spread[name] = [max(pair) for pair in zip(largest, strays, strict=True)]
    return {name: list(accumulate(values, max)) for name, values in spread.items()}


def tolerances_of(spread: Mapping[str, Sequence[float]]) -> dict[str, float | Sequence[float]]:
    """Return what a measured spread allows: so many times as much, and what the print rounds."""

    def allowed(name: str, value: float) -> float:
        return max(FACTOR * value, AS_PRINTED[name]) if value < UNBOUNDED else sys.float_info.max

    found = {name: [allowed(name, value) for value in values] for name, values in spread.items()}
    return {**found, **EXACT}


def values_compared(tolerances: Tolerances) -> int:
    """Return how many losses in the order of steps, the validation loss last, mean something."""
    allowed: list[float] = []
    for name in ("lm loss", "validation loss"):
        values = tolerances[name]
        assert isinstance(values, Sequence)
        allowed += values
    return len(list(takewhile(lambda value: value <= LARGEST, allowed)))


def differences_from(record: Mapping[str, Any], found: Metrics) -> list[str]:
    """Return where a run differs from a recorded one, in the values that last bits leave equal."""
    tolerances = tolerances_of(record["spread"])
    values = values_compared(tolerances)
    expected, found = (first_values(item, values) for item in (record["metrics"], found))
    return differences(expected, found, tolerances)


def differences(
    expected: Metrics, found: Metrics, tolerances: Tolerances, *, exact: bool = False
) -> list[str]:
    """Return where two runs differ by more than allowed; if ``exact``, printed norms may not."""
    sentences = []
    for name in METRICS:
        left, right, allowed = expected[name], found[name], tolerances[name]
        if len(left) != len(right):
            sentences.append(f"{name}: {len(left)} values expected, {len(right)} found")
            continue
        rounding = 0.0 if exact else ROUNDING.get(name, 0.0)
        for step, (wanted, got) in enumerate(zip(left, right, strict=True)):
            tolerance = allowed[step] if isinstance(allowed, Sequence) else allowed
            if not (math.isfinite(got) and abs(got - wanted) <= tolerance * abs(wanted) + rounding):
                sentences.append(
                    f"{name}, value {step + 1}: {wanted!r} expected, {got!r} found, "
                    f"relative difference {_relative(wanted, got):.1e}, allowed {tolerance:.1e}"
                )
    return sentences


def largest_difference(expected: Metrics, found: Metrics, name: str) -> float:
    """Return the largest relative difference of a metric."""
    return max(map(_relative, expected[name], found[name]), default=0.0)


def _relative(wanted: float, got: float) -> float:
    return abs(got - wanted) / abs(wanted) if wanted else abs(got)
