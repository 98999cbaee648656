"""Alternating measurement: both sides see the same disturbances of a shared machine."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.rounds import measured, milliseconds, ratios

Work = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """Times of one contest in ms, and the ratio theirs / ours pair by pair.

    Attributes:
        ours: Median time.
        ours_spread: Lower and upper quartile.
        theirs: Median time of the other side.
        theirs_spread: Its quartiles.
        ratio: Median of the ratios of pairs; above 1 we are faster.
        ratio_spread: Quartiles of the ratios.
        pairs: Number of pairs.
    """

    ours: float
    ours_spread: tuple[float, float]
    theirs: float
    theirs_spread: tuple[float, float]
    ratio: float
    ratio_spread: tuple[float, float]
    pairs: int


def contest(ours: Work, theirs: Work, pairs: int, warmup: int = 2) -> Sample:
    """Run both in turn, swapping who goes first, and compare them pair by pair."""
    times = measured({"ours": _timed(ours), "theirs": _timed(theirs)}, pairs, warmup)
    (a, mine, b), (c, other, d) = (statistics.quantiles(one, n=4) for one in times.values())
    low, middle, high = ratios(times["theirs"], times["ours"])
    return Sample(mine, (a, b), other, (c, d), middle, (low, high), pairs)


def _timed(work: Work) -> Callable[[int], float]:
    return lambda round_: milliseconds(work)
