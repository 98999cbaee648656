"""Count what the contestants of a section do, in the same processes, on the same gradients."""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.about import table
from benchmarks.optimizer_step.arms import SECTIONS, Contestant, Section
from megatron_eopt.tools.dry_run import Counts
from megatron_eopt.tools.plan.cost import bytes_sent
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron

STEPS = 3


@dataclass(frozen=True)
class Counted:
    """One contestant's step: for each figure, the largest value of all ranks."""

    section: str  # its layout
    name: str
    gigaflops: float  # GFLOP of matrix products
    megabytes: float  # MB sent
    calls: int  # number of collectives
    apart: float  # largest distance of a weight from ours, relative to its change in three steps


def measure(section: Section, timeout: float) -> list[Counted]:
    """Count all contestants of one section."""
    ranks = run_ranks(section.ranks, _on_rank, SECTIONS.index(section), timeout=timeout, cpu=True)
    found = []
    for arm in section.arms:
        most = [max(each) for each in zip(*(rank[arm.name] for rank in ranks), strict=True)]
        found.append(Counted(section.name, arm.name, *most))
    return found


def shown(steps: list[dict[str, Any]]) -> str:
    """Return the table of all contestants."""
    rows = [
        [
            *(one["section"], one["name"], f"{one['gigaflops']:.1f}", f"{one['megabytes']:.1f}"),
            *(str(one["calls"]), f"{one['apart']:.0e}" if one["apart"] else ""),
        ]
        for one in steps
    ]
    return table("layout | optimizer | GFLOP: | MB sent: | calls: | difference:", rows)


def _on_rank(number: int) -> dict[str, tuple[float, float, int, float]]:
    section = SECTIONS[number]
    initialize_megatron(tp=section.tp)
    contestants = {arm.name: Contestant(section, arm) for arm in section.arms}
    ours = next(iter(contestants.values()))
    start = ours.weights()
    counts = {name: _counts(contestant) for name, contestant in contestants.items()}
    end = ours.weights()
    return {
        name: (
            counted.flops / 1e9,
            sum(bytes_sent(call) * count for call, count in counted.collectives.items()) / 1e6,
            counted.collectives.total(),
            _apart(contestants[name].weights(), end, start),
        )
        for name, counted in counts.items()
    }


def _counts(contestant: Contestant) -> Counts:
    """Count the last of several steps, since the first ones allocate state and buffers."""
    for step in range(STEPS):
        contestant.set_gradients(step)
        with Counts() as counts:
            contestant.optimizer.step()
    return counts


def _apart(
    theirs: list[torch.Tensor], ours: list[torch.Tensor], start: list[torch.Tensor]
) -> float:
    return max(
        float((a - b).norm()) / max(float((a - s).norm()), 1e-30)
        for a, b, s in zip(theirs, ours, start, strict=True)
    )
