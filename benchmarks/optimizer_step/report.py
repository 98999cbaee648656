"""Draws the results."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.optimizer_step.measure import Result


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
