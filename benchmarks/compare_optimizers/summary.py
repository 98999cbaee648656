"""From the results of all runs to one learning rate of each optimizer, and how fast it trains."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from benchmarks.compare_optimizers.grid import Grid
from benchmarks.compare_optimizers.trainings import Result


@dataclass(frozen=True)
class Arm:
    """An optimizer with one learning rate: all its seeds."""

    optimizer: str
    lr: float
    results: tuple[Result, ...]

    @property
    def median(self) -> float:
        """Median of the held-out losses at the end; infinite where too many runs diverged."""
        return statistics.median(result.last for result in self.results)

    @property
    def range(self) -> tuple[float, float]:
        """Least and largest held-out loss at the end."""
        last = [result.last for result in self.results]
        return min(last), max(last)

    @cached_property
    def curve(self) -> dict[int, tuple[float, float, float]]:
        """Least, median and largest held-out loss of the seeds that did not diverge, by step."""
        curves = [result.held_out for result in self.results if not result.diverged]
        steps = sorted(set[int]().union(*curves).intersection(*curves))
        found = {step: [curve[step] for curve in curves] for step in steps}
        return {
            step: (min(losses), statistics.median(losses), max(losses))
            for step, losses in found.items()
        }

    def steps_to(self, loss: float) -> float:
        """Return after how many steps the median is at ``loss``; infinite if it never is.

        Between evaluations it is taken to be straight, before the first one to be that one's.
        """
        medians = [(step, median) for step, (_, median, _) in self.curve.items()]
        if medians and medians[0][1] <= loss:
            return medians[0][0]
        for (start, above), (end, below) in pairwise(medians):
            if below <= loss:
                return start + (end - start) * (above - loss) / (above - below)
        return math.inf


@dataclass(frozen=True)
class Summary:
    """What is drawn and told of one optimizer.

    Attributes:
        arms: All learning rates of its grid, ascending.
        best: The one with the least median.
        step_seconds: Least of all its runs' medians. A step takes the same at any learning rate,
            and what else the machine does meanwhile only adds.
        step_range: Least and largest of these medians.
    """

    arms: tuple[Arm, ...]
    best: Arm
    step_seconds: float
    step_range: tuple[float, float]

    @property
    def at_edge(self) -> bool:
        """Whether a wider grid might have a better learning rate."""
        return len(self.arms) > 1 and self.best in (self.arms[0], self.arms[-1])


def summaries(grid: Grid, results: Sequence[Result]) -> dict[str, Summary]:
    """Return the summary of every optimizer of a grid."""
    return {name: _summary(name, rates, results) for name, rates in grid.items()}


def _summary(name: str, rates: Sequence[float], results: Sequence[Result]) -> Summary:
    own = [result for result in results if result.run.optimizer == name]
    arms = tuple(Arm(name, lr, tuple(r for r in own if r.run.lr == lr)) for lr in rates)
    best = min(arms, key=lambda arm: arm.median)
    # a run that diverged in its second step has no time
    seconds = [r.step_seconds for r in own if math.isfinite(r.step_seconds)] or [math.nan]
    return Summary(arms, best, min(seconds), (min(seconds), max(seconds)))


def common_loss(found: dict[str, Summary]) -> float:
    """Return the least loss that every optimizer's best median reaches, diverged ones aside."""
    finite = [s.best.median for s in found.values() if math.isfinite(s.best.median)]
    return max(finite, default=math.nan)
