"""Runs the contestants in turn, in the same processes, on the same gradients."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fsdp2.arms import (
    EVEN,
    OURS,
    UNEVEN,
    Contestant,
    reference,
)
from benchmarks.fsdp2.wire import Wire
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
    times = {
        arm: [max(rank[arm]["times"][step] for rank in found) for step in range(rounds)]
        for arm in arms
    }
    return [
        Figures(
            ranks,
            arm,
            times[arm],
            _quartiles([a / b for a, b in zip(times[arm], times[OURS], strict=True)]),
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
    results: dict[str, dict[str, Any]] = {arm: {"times": []} for arm in arms}
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
    for round_ in range(WARM_UP + rounds if rounds else 0):
        # who goes first changes from round to round
        order = arms[round_ % len(arms) :] + arms[: round_ % len(arms)]
        for arm in order:
            contestants[arm].set_gradients(round_)
            elapsed = _time_step(contestants[arm])
            if round_ >= WARM_UP:
                results[arm]["times"].append(elapsed)
    return results


def _uneven(arm: str) -> float:
    contestant = Contestant(arm, UNEVEN)
    for step in range(COMPARED):
        contestant.set_gradients(step)
        contestant.optimizer.step()
    return _difference(contestant.weights(), reference(UNEVEN, COMPARED), UNEVEN)


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if values else []


def _time_step(contestant: Contestant) -> float:
    dist.barrier()
    began = time.perf_counter()
    contestant.optimizer.step()
    return 1e3 * (time.perf_counter() - began)


def _difference(ours: list[torch.Tensor], expected: list[torch.Tensor], shapes: Any) -> float:
    start = reference(shapes, 0)
    return max(
        float((a - b).norm() / (b - s).norm())
        for a, b, s in zip(ours, expected, start, strict=True)
    )
