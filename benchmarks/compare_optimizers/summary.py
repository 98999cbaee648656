"""Choose each optimizer's best learning rate from all runs, and measure how fast it trains."""

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
    """All seeds of an optimizer with one learning rate."""

    optimizer: str
    lr: float
    results: tuple[Result, ...]

    @property
    def median(self) -> float:
        """Median final held-out loss; infinite if half of the runs diverged."""
        return statistics.median(result.last for result in self.results)

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest final held-out loss."""
        last = [result.last for result in self.results]
        return min(last), max(last)

    @cached_property
    def curve(self) -> dict[int, tuple[float, float, float]]:
        """By step, the smallest, median and largest held-out loss of seeds that did not diverge."""
        curves = [result.held_out for result in self.results if not result.diverged]
        steps = sorted(set[int]().union(*curves).intersection(*curves))
        found = {step: [curve[step] for curve in curves] for step in steps}
        return {
            step: (min(losses), statistics.median(losses), max(losses))
            for step, losses in found.items()
        }

    def steps_to(self, loss: float) -> float:
        """Return the number of steps until the median reaches ``loss``; infinite if it never does.

        Losses between two evaluations are interpolated linearly.
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
    """The result of one optimizer.

    Attributes:
        arms: All learning rates of its grid, ascending.
        best: The learning rate with the smallest median loss.
        step_seconds: Smallest median of all its runs, since the learning rate does not change a
            step's time, and other load on the machine only adds to it.
        step_range: Smallest and largest of these medians.
    """

    arms: tuple[Arm, ...]
    best: Arm
    step_seconds: float
    step_range: tuple[float, float]

    @property
    def at_edge(self) -> bool:
        """Whether the best learning rate is the smallest or largest of several."""
        return len(self.arms) > 1 and self.best in (self.arms[0], self.arms[-1])


def summaries(grid: Grid, results: Sequence[Result]) -> dict[str, Summary]:
    """Return the summary of every optimizer of a grid."""
    return {name: _summary(name, rates, results) for name, rates in grid.items()}


def _summary(name: str, rates: Sequence[float], results: Sequence[Result]) -> Summary:
    own = [result for result in results if result.run.optimizer == name]
    arms = tuple(Arm(name, lr, tuple(r for r in own if r.run.lr == lr)) for lr in rates)
    best = min(arms, key=lambda arm: arm.median)
    # a run that diverged in its second step has no step time
    seconds = [r.step_seconds for r in own if math.isfinite(r.step_seconds)] or [math.nan]
    return Summary(arms, best, min(seconds), (min(seconds), max(seconds)))


def common_loss(found: dict[str, Summary]) -> float:
    """Return the smallest loss that the best median of every optimizer reaches, if it converged."""
    finite = [s.best.median for s in found.values() if math.isfinite(s.best.median)]
    return max(finite, default=math.nan)
