"""Report a comparison as a table, a JSON document and a plot."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from benchmarks.compare_optimizers.summary import Arm, Summary, common_loss
from benchmarks.compare_optimizers.trainings import Result, Settings

CHOICE = "The plot shows each optimizer's learning rate with the best median held-out loss."
TIMES = "Time is steps times seconds per step. Seconds per step are the fastest run's median."


def table(found: dict[str, Summary]) -> Table:
    """Return a table of the whole grid; a star marks the best learning rates."""
    common = common_loss(found)
    made = Table(title="Final held-out loss (nats per byte); * marks the best lr", box=box.SIMPLE)
    made.pad_edge = False
    for heading in ("optimizer", "lr", "median", "range"):
        made.add_column(heading, no_wrap=True)
    for heading in ("s/step", "steps", "s"):
        made.add_column(heading, no_wrap=True, justify="right")
    made.caption = f"steps, s: until the median loss is {common:.4f}, which all best lr reach"
    for name, summary in found.items():
        for arm in summary.arms:
            best = arm is summary.best
            steps = arm.steps_to(common)
            told = (f"{summary.step_seconds:.3f}", _or_dash(steps, ".0f")) if best else ("", "")
            seconds = _or_dash(steps * summary.step_seconds, ".0f") if best else ""
            star = "*" if best else " "
            rate = f"{arm.lr:g} {star}"
            made.add_row(name, rate, _or_dash(arm.median, ".4f"), _range(arm), *told, seconds)
    return made


def notes(found: dict[str, Summary]) -> list[str]:
    """Return remarks to print below the table."""
    edges = [
        f"{name}: {summary.best.lr:g} is at the edge of its grid; try learning rates beyond it."
        for name, summary in found.items()
        if summary.at_edge
    ]
    diverged = [
        f"{name}, {arm.lr:g}: {count} of {len(arm.results)} runs diverged."
        for name, summary in found.items()
        for arm in summary.arms
        if (count := sum(result.diverged for result in arm.results))
    ]
    return [CHOICE, TIMES, *edges, *diverged]


def document(
    settings: Settings, found: dict[str, Summary], results: Sequence[Result]
) -> dict[str, Any]:
    """Return all figures of a comparison for JSON; infinite and unknown values are null."""
    common = common_loss(found)
    return {
        "steps": settings.steps,
        "processes": settings.processes,
        "flags": list(settings.flags),
        "choice": CHOICE,
        "times": TIMES,
        "grid": {name: [arm.lr for arm in summary.arms] for name, summary in found.items()},
        "common_loss": _finite(common),
        "optimizers": {name: _entry(summary, common) for name, summary in found.items()},
        "runs": [
            {
                "optimizer": result.run.optimizer,
                "lr": result.run.lr,
                "seed": result.run.seed,
                "diverged": result.diverged,
                "median_seconds_per_step": _finite(result.step_seconds),
                "held_out": result.held_out,
            }
            for result in results
        ],
    }


def _entry(summary: Summary, common: float) -> dict[str, Any]:
    steps = summary.best.steps_to(common)
    return {
        "lr": summary.best.lr,
        "at_edge_of_grid": summary.at_edge,
        "held_out_median": _finite(summary.best.median),
        "held_out_range": [_finite(loss) for loss in summary.best.range],
        "median_of_grid": {f"{arm.lr:g}": _finite(arm.median) for arm in summary.arms},
        "seconds_per_step": _finite(summary.step_seconds),
        "seconds_per_step_range": [_finite(seconds) for seconds in summary.step_range],
        "steps_to_common_loss": _finite(steps),
        "seconds_to_common_loss": _finite(steps * summary.step_seconds),
    }


def draw(settings: Settings, found: dict[str, Summary]) -> Figure:
    """Plot held-out losses by step and by time: the median of seeds, and a band for their range."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for number, summary in enumerate(found.values()):
        curve = summary.best.curve
        if not curve:
            continue
        low, median, high = zip(*curve.values(), strict=True)
        for panel, scale in zip(axes, (1.0, summary.step_seconds), strict=True):
            x = [scale * step for step in curve]
            panel.plot(x, median, "o-", lw=1.5, ms=3, color=f"C{number}", label=label(summary))
            panel.fill_between(x, low, high, color=f"C{number}", alpha=0.25, lw=0)
    axes[0].set(xlabel="step", ylabel="held-out loss (nats per byte)")
    axes[1].set(xlabel="seconds of training (steps x seconds per step)")
    for panel in axes:
        panel.grid(alpha=0.3)
    if axes[0].lines:
        axes[0].legend(fontsize="small")
    figure.suptitle(caption(settings, found), fontsize="small")
    return figure


def label(summary: Summary) -> str:
    """Return an optimizer's legend entry: its learning rate and the grid that was searched."""
    grid = ", ".join(f"{arm.lr:g}" for arm in summary.arms)
    return f"{summary.best.optimizer}, lr {summary.best.lr:g} of {grid}"


def caption(settings: Settings, found: dict[str, Summary]) -> str:
    """Return the plot's title: what was trained, and what lines and bands mean."""
    runs = next(iter(found.values())).best.results
    seeds = ", ".join(str(result.run.seed) for result in runs)
    where = f"{settings.steps} steps on {settings.processes} processes"
    where = where.removesuffix("es") if settings.processes == 1 else where
    flags = " ".join(settings.flags)
    what = f"The quickstart's GPT, {where}; line: median, band: range of seeds {seeds}"
    return f"{what}\n{flags}" if flags else what


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _or_dash(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"


def _range(arm: Arm) -> str:
    return " .. ".join(_or_dash(loss, ".4f") for loss in arm.range)
