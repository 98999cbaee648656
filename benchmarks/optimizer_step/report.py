"""Prints and draws the results."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.optimizer_step.measure import Result
from benchmarks.optimizer_step.train_step import TrainStep


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table: times of every contestant, then how many times ours they take."""
    lines = [
        "| layout | optimizer | median ms | quartiles | x ours | quartiles | weights differ |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        ratios = {ratio.name: ratio for ratio in result.ratios}
        for name, times in result.times.items():
            low, middle, high = statistics.quantiles(times, n=4)
            cells = [result.section, name, f"{middle:.0f}", f"{low:.0f} .. {high:.0f}"]
            if name in ratios:
                r = ratios[name]
                cells += [f"{r.median:.2f}", f"{r.low:.2f} .. {r.high:.2f}"]
                cells += [f"{r.weight_difference:.1e} ({r.step_difference:.1e} of the way)"]
            else:
                cells += ["1", "", ""]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def train_table(steps: Sequence[TrainStep]) -> str:
    """Return a Markdown table of whole train steps, each against the last one's."""
    lines = [
        "| optimizer | forward, backward ms | step ms | step's share | whole, x the last |",
        "|---|---:|---:|---:|---:|",
    ]
    for one in steps:
        pairs = [a / b for a, b in zip(one.whole, steps[-1].whole, strict=True)]
        shares = [a / b for a, b in zip(one.step, one.whole, strict=True)]
        cells = [one.name, f"{statistics.median(one.gradients):.0f}"]
        cells += [f"{statistics.median(one.step):.0f}", f"{statistics.median(shares):.1%}"]
        cells += [f"{statistics.median(pairs):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw one panel a section: a box of times for every contestant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(results), squeeze=False, figsize=(6 * len(results), 3))
    for panel, result in zip(panels[0], results, strict=True):
        names = list(result.times)
        panel.boxplot([result.times[name] for name in names], orientation="horizontal")
        panel.set_yticks(range(1, len(names) + 1), names)
        panel.set_xlim(left=0)
        panel.set_xlabel("ms per optimizer step")
        panel.set_title(result.section)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
