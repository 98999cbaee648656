"""Runs the contestants in turn, in the same processes, on the same gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.fsdp2.arms import (
    EVEN,
    OURS,
    UNEVEN,
    Contestant,
    reference,
)
from benchmarks.fsdp2.wire import Wire
from benchmarks.rounds import measured, milliseconds, ratios, slowest
from tests.harness import run_ranks
from tests.harness.pool import RankError, RankTimeoutError

WARM_UP = 2
COMPARED = 3


@dataclass(frozen=True)
class Figures:
    """One contestant's figures on one number of ranks.

    Attributes:
        ranks: Processes.
        arm: Its name.
        times: Milliseconds of every step, the slowest rank's.
        ratios: Quartiles of its time over ours, step by step.
        calls: Collectives of one step, by name, on the first rank.
        bytes_sent: Bytes of one step, sent by all ranks.
        difference: Largest distance of a weight from the float32 reference after three steps, as a
            part of the way that the reference has moved it.
    """

    ranks: int
    arm: str
    times: list[float]
    ratios: list[float]
    calls: dict[str, int]
    bytes_sent: int
    difference: float


def measure(ranks: int, arms: Sequence[str], rounds: int, timeout: float) -> list[Figures]:
    """Time, count and compare all contestants on evenly cut matrices."""
    found = run_ranks(ranks, _on_rank, list(arms), rounds, timeout=timeout, cpu=False)
    times = {arm: slowest([rank[arm]["times"] for rank in found]) for arm in arms}
    return [
        Figures(
            ranks,
            arm,
            times[arm],
            ratios(times[arm], times[OURS]),
            found[0][arm]["calls"],
            round(sum(rank[arm]["bytes"] for rank in found)),
            found[0][arm]["difference"],
        )
        for arm in arms
    ]


def try_uneven(ranks: int, arm: str, timeout: float) -> str:
    """Return how a step with rows that do not divide ends: a distance, or what went wrong."""
    try:
        found = run_ranks(ranks, _uneven, arm, timeout=timeout, cpu=False)
    except (RankError, RankTimeoutError) as error:
        last = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
        return f"fails: {last[:160]}"
    return f"{found[0]:.1e} of the way"


def _on_rank(arms: list[str], rounds: int) -> dict[str, Any]:
    contestants = {arm: Contestant(arm, EVEN) for arm in arms}
    results: dict[str, dict[str, Any]] = {arm: {} for arm in arms}
    for step in range(COMPARED):
        for arm, contestant in contestants.items():
            contestant.set_gradients(step)
            # no compiler under a dispatch mode
            with torch.compiler.set_stance("force_eager"), Wire() as wire:
                contestant.optimizer.step()
            results[arm] |= {"calls": dict(wire.calls), "bytes": wire.bytes_sent}
    expected = reference(EVEN, COMPARED)
    for arm, contestant in contestants.items():
        results[arm]["difference"] = _difference(contestant.weights(), expected, EVEN)
    timed = {arm: partial(_step, contestant) for arm, contestant in contestants.items()}
    for arm, times in measured(timed, rounds, WARM_UP if rounds else 0).items():
        results[arm]["times"] = times
    return results


def _step(contestant: Contestant, round_: int) -> float:
    contestant.set_gradients(round_)
    return milliseconds(contestant.optimizer.step)


def _uneven(arm: str) -> float:
    contestant = Contestant(arm, UNEVEN)
    for step in range(COMPARED):
        contestant.set_gradients(step)
        contestant.optimizer.step()
    return _difference(contestant.weights(), reference(UNEVEN, COMPARED), UNEVEN)


def _difference(ours: list[torch.Tensor], expected: list[torch.Tensor], shapes: Any) -> float:
    start = reference(shapes, 0)
    return max(
        float((a - b).norm() / (b - s).norm())
        for a, b, s in zip(ours, expected, start, strict=True)
    )
