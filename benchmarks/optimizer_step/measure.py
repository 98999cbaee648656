"""Runs the contestants of a section in turn, in the same processes, on the same gradients."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.optimizer_step.arms import SECTIONS, Contestant, ProductsT, Section
from benchmarks.rounds import measured, milliseconds, ratios, slowest
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
    times = {arm.name: slowest([r["times"][arm.name] for r in ranks]) for arm in section.arms}
    ours = section.arms[0].name
    found = []
    for arm in section.arms[1:]:
        low, middle, high = ratios(times[arm.name], times[ours])
        weight = max(r["differences"][arm.name][0] for r in ranks)
        step = max(r["differences"][arm.name][1] for r in ranks)
        found.append(Ratio(arm.name, middle, low, high, weight, step))
    return Result(section.name, section.ranks, rounds, times, found)


def _on_rank(number: int, products: ProductsT, rounds: int) -> dict[str, Any]:
    section = SECTIONS[number]
    initialize_megatron(tp=section.tp)
    contestants = {arm.name: Contestant(section, arm, products) for arm in section.arms}
    ours, *others = contestants
    start = contestants[ours].weights()
    steps = {name: partial(_step, contestant) for name, contestant in contestants.items()}
    times = measured(steps, rounds, WARM_UP)
    end = contestants[ours].weights()
    differences = {name: _compare(contestants[name].weights(), end, start) for name in others}
    return {"times": times, "differences": differences}


def _step(contestant: Contestant, round_: int) -> float:
    contestant.set_gradients(round_)
    return milliseconds(contestant.optimizer.step)


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
