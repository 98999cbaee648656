"""Whether two runs are the same, metric by metric.

The tolerances are relative to the expected value. Losses are printed with seven digits, norms with
three decimals; a norm may besides differ by one in the last decimal, since it is rounded.
"""

import math
from collections.abc import Mapping

from tests.functional.metrics import METRICS, Metrics

_EXACT = {"learning rate": 0.0, "skipped": 0.0, "nan": 0.0}
"""Schedules and counts do not depend on rounding."""

GOLDEN = {
    "lm loss": 2e-5,
    "validation loss": 2e-5,
    "grad norm": 1e-3,
    "params norm": 1e-4,
    **_EXACT,
}
"""Against recorded values. Another processor sums in another order: with the instruction sets of
older processors, losses after six steps of Muon differ by up to 8e-7 (scion: 4e-6). The allowance
is several times that, and a momentum that is wrong by one per cent, which changes them by 2e-4 or
more, is still noticed (``notices`` of the cases)."""

RESUME = {**dict.fromkeys(METRICS, 0.0), "lm loss": 1e-6}
"""Going on is the same arithmetic on the same numbers. The loss of a process's second step is taken
out of a printed mean, which costs a digit."""

PARITY = {
    "lm loss": 1e-5,
    "validation loss": 1e-5,
    "grad norm": 1e-3,
    "params norm": 1e-4,
    **_EXACT,
}
"""Between storages and trainers: the same arithmetic summed in another order."""

ROUNDING = {"grad norm": 1.01e-3, "params norm": 1.01e-3}
"""One in the last printed decimal."""


def differences(
    expected: Metrics, found: Metrics, tolerances: Mapping[str, float], *, exact: bool = False
) -> list[str]:
    """Return where two runs differ by more than allowed, as sentences; none means equal.

    Args:
        expected: Metrics by name.
        found: The other run's.
        tolerances: Largest relative differences by metric.
        exact: Whether printed norms must be the same too.
    """
    sentences = []
    for name in METRICS:
        left, right = expected[name], found[name]
        if len(left) != len(right):
            sentences.append(f"{name}: {len(left)} values expected, {len(right)} found")
            continue
        rounding = 0.0 if exact else ROUNDING.get(name, 0.0)
        for step, (wanted, got) in enumerate(zip(left, right, strict=True), 1):
            allowed = tolerances[name] * abs(wanted) + rounding
            if not (math.isfinite(got) and abs(got - wanted) <= allowed):
                sentences.append(
                    f"{name}, value {step}: {wanted!r} expected, {got!r} found, "
                    f"relative difference {_relative(wanted, got):.1e}, allowed "
                    f"{tolerances[name]:.0e}"
                )
    return sentences


def largest_difference(expected: Metrics, found: Metrics, name: str) -> float:
    """Return the largest relative difference of a metric."""
    return max(map(_relative, expected[name], found[name]), default=0.0)


def _relative(wanted: float, got: float) -> float:
    return abs(got - wanted) / abs(wanted) if wanted else abs(got)
