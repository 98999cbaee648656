"""Runs the contestants of a section in turn, in the same processes, on the same gradients."""

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.about import in_turn
from benchmarks.optimizer_step.arms import SECTIONS, Contestant, ProductsT, Section
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron

WARM_UP = 2


@dataclass(frozen=True)
class Ratio:
    """Time of one contestant over ours, round by round.

    Attributes:
        name: The other contestant.
        median: Median of the pairwise ratios.
        low: Their first quartile.
        high: Their third quartile.
        weight_difference: Largest norm of a parameter's difference relative to the parameter.
        step_difference: The same relative to the distance travelled.
    """

    name: str
    median: float
    low: float
    high: float
    weight_difference: float
    step_difference: float


@dataclass(frozen=True)
class Result:
    """A section's figures; times in milliseconds, the slowest rank's of every round."""

    section: str
    ranks: int
    rounds: int
    times: dict[str, list[float]]
    ratios: list[Ratio]

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and numbers."""
        return asdict(self)


def measure(section: Section, products: ProductsT, rounds: int, timeout: float) -> Result:
    """Run one section."""
    number = SECTIONS.index(section)
    ranks = run_ranks(section.ranks, _on_rank, number, products, rounds, timeout=timeout, cpu=True)
    times = {
        arm.name: [max(r["times"][arm.name][i] for r in ranks) for i in range(rounds)]
        for arm in section.arms
    }
    ours = section.arms[0].name
    ratios = []
    for arm in section.arms[1:]:
        pairs = [a / b for a, b in zip(times[arm.name], times[ours], strict=True)]
        low, _, high = statistics.quantiles(pairs, n=4)
        weight = max(r["differences"][arm.name][0] for r in ranks)
        step = max(r["differences"][arm.name][1] for r in ranks)
        ratios.append(Ratio(arm.name, statistics.median(pairs), low, high, weight, step))
    return Result(section.name, section.ranks, rounds, times, ratios)


def _on_rank(number: int, products: ProductsT, rounds: int) -> dict[str, Any]:
    section = SECTIONS[number]
    initialize_megatron(tp=section.tp)
    contestants = [Contestant(section, arm, products) for arm in section.arms]
    start = contestants[0].weights()
    times: dict[str, list[float]] = {arm.name: [] for arm in section.arms}
    for round_, contestant in in_turn(contestants, WARM_UP + rounds):
        contestant.set_gradients(round_)
        elapsed = _time_step(contestant)
        if round_ >= WARM_UP:
            times[contestant.arm.name].append(elapsed)
    ours = contestants[0].weights()
    differences = {c.arm.name: _compare(c.weights(), ours, start) for c in contestants[1:]}
    return {"times": times, "differences": differences}


def _time_step(contestant: Contestant) -> float:
    dist.barrier()
    began = time.perf_counter()
    contestant.optimizer.step()
    return 1e3 * (time.perf_counter() - began)


def _compare(
    theirs: list[torch.Tensor], ours: list[torch.Tensor], start: list[torch.Tensor]
) -> tuple[float, float]:
    """Return the largest relative difference of a parameter, and relative to its travel."""
    weight = step = 0.0
    for a, b, s in zip(theirs, ours, start, strict=True):
        gap = float((a - b).norm())
        weight = max(weight, gap / max(float(a.norm()), 1e-30))
        step = max(step, gap / max(float((a - s).norm()), 1e-30))
    return weight, step
