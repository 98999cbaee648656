"""Draw docs/figures/front.svg, the picture of README.md, from docs/benchmarks/*.json.

python scripts/draw_front.py [FILE]
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
# keep text as text, and make the file reproducible
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "front", "font.size": 11})

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

DOCS = Path(__file__).resolve().parents[1] / "docs"
TARGET = DOCS / "figures" / "front.svg"
OURS, OTHER = "#d9480f", "#8d99ae"


def data(name: str) -> dict[str, Any]:
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())


def draw_losses(axes: Axes) -> None:
    """Draw the median held-out loss of each optimizer at its best learning rate."""
    found = data("compare_optimizers")
    for name, color in (("adam", OTHER), ("muon", OURS)):
        lr = found["optimizers"][name]["lr"]
        runs = [r["held_out"] for r in found["runs"] if (r["optimizer"], r["lr"]) == (name, lr)]
        steps = sorted(map(int, runs[0]))
        losses = [statistics.median(run[str(step)] for run in runs) for step in steps]
        axes.plot(steps, losses, "o-", ms=3, color=color, label=name.capitalize())
    common = found["optimizers"]["adam"]["held_out_median"]
    at = found["optimizers"]["muon"]["steps_to_common_loss"]
    axes.plot([at, found["steps"]], [common, common], ":", lw=1, color="black")
    axes.set_title(f"Adam's loss at step {found['steps']} after {at:.0f} steps")
    axes.set(xlabel="step", ylabel="held-out loss")
    axes.legend(frameon=False)


def draw_bars(
    axes: Axes, title: str, place: str, unit: str, bars: dict[str, tuple[float, str]]
) -> None:
    """Draw a labelled bar for each name; ``bars`` has its value and color."""
    values = [value for value, _ in bars.values()]
    drawn = axes.barh(list(bars), values, color=[color for _, color in bars.values()], height=0.6)
    axes.bar_label(drawn, [f"{value:.2g} {unit}" for value in values], padding=3)
    axes.set(title=title, xlabel=place, xticks=[], xlim=(0, max(values) * 1.35))
    axes.spines["bottom"].set_visible(False)
    axes.invert_yaxis()


def draw(target: Path) -> None:
    found = data("gpu_check")
    sections, place = found["sections"], f"one H100, commit {found['machine']['commit']}"
    times = sections["step"]["figures"]["milliseconds"]
    standing = {
        name: sections["memory"]["figures"][name][0]["standing"] / 1e9 for name in ("adam", "muon")
    }
    figure, axes = plt.subplots(
        1, 3, figsize=(10.5, 2.8), layout="constrained", width_ratios=[1.15, 1, 1]
    )
    draw_losses(axes[0])
    milliseconds = {
        "Muon": (times["muon"], OURS),
        "Megatron's\nMuon": (times["stock muon, layer-wise"], OTHER),
    }
    draw_bars(axes[1], "Optimizer step", place, "ms", milliseconds)
    memory = {"Muon": (standing["muon"], OURS), "Adam": (standing["adam"], OTHER)}
    draw_bars(axes[2], "Training memory", place, "GB", memory)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
