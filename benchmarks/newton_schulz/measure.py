"""Alternating measurement: both sides see the same disturbances of a shared machine."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

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


def _milliseconds(work: Work) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def contest(ours: Work, theirs: Work, pairs: int, warmup: int = 2) -> Sample:
    """Run both in turn, swapping who goes first, and compare them pair by pair."""
    mine: list[float] = []
    other: list[float] = []
    for pair in range(warmup + pairs):
        if pair % 2:
            b, a = _milliseconds(theirs), _milliseconds(ours)
        else:
            a, b = _milliseconds(ours), _milliseconds(theirs)
        if pair >= warmup:
            mine.append(a)
            other.append(b)
    ratios = [b / a for a, b in zip(mine, other, strict=True)]
    return Sample(
        statistics.median(mine),
        _quartiles(mine),
        statistics.median(other),
        _quartiles(other),
        statistics.median(ratios),
        _quartiles(ratios),
        pairs,
    )
