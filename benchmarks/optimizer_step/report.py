"""Prints and draws the results."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.optimizer_step.measure import Result


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


def write_json(results: Sequence[Result], path: Path) -> None:
    """Write all figures."""
    path.write_text(json.dumps([result.to_json() for result in results], indent=2) + "\n")


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
