"""Draw docs/figures/redistribution.svg: how one step redistributes matrices over four ranks.

python scripts/draw_redistribution.py [FILE]
"""

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
# keep text as text, and make the file reproducible
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "redistribution", "font.size": 8})

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import FancyArrowPatch, Rectangle  # noqa: E402

TARGET = Path(__file__).resolve().parents[1] / "docs" / "figures" / "redistribution.svg"

MATRICES = {"Q": "#4c78a8", "K": "#f58518", "V": "#e45756", "up": "#72b7b2", "gate": "#54a24b"}
ROWS = {"Q": 10, "K": 3, "V": 3, "up": 10, "gate": 10}
OWNERS = {"Q": 0, "K": 1, "V": 1, "up": 2, "gate": 3}
RANKS = 4
PER_RANK = sum(ROWS.values()) / RANKS
"""Rows in each rank's shard; all rows have the same length in this figure."""

COLUMNS = {"stored": 0.0, "owners": 5.0, "stored again": 10.0}
TITLES = {
    "stored": "storage layout\nfragments of flat buffers",
    "owners": "compute layout\nwhole matrices at owners",
    "stored again": "storage layout\nupdates, applied in place",
}
WIDTH, HEIGHT = 2.4, 1.0


def fragments() -> list[list[tuple[str, float]]]:
    """Return each rank's shard as (matrix, rows) pairs: matrices in order, split evenly."""
    ranks: list[list[tuple[str, float]]] = [[] for _ in range(RANKS)]
    start = 0.0
    for name, rows in ROWS.items():
        left = float(rows)
        while left > 0:
            rank = int(start // PER_RANK)
            taken = min(left, (rank + 1) * PER_RANK - start)
            ranks[rank].append((name, taken))
            start, left = start + taken, left - taken
    return ranks


def top(rank: int) -> float:
    return -rank * (HEIGHT + 0.45)


def draw_stack(axes: Axes, x: float, rank: int, parts: list[tuple[str, float]]) -> None:
    """Draw a rank's parts side by side, with widths proportional to their rows."""
    total = sum(rows for _, rows in parts)
    left = x
    for name, rows in parts:
        width = WIDTH * rows / total
        box = Rectangle((left, top(rank) - HEIGHT), width, HEIGHT)
        box.set(facecolor=MATRICES[name], edgecolor="white", linewidth=1.5)
        axes.add_patch(box)
        if rows > 1:
            middle = (left + width / 2, top(rank) - HEIGHT / 2)
            axes.text(*middle, name, ha="center", va="center", color="white")
        left += width


def draw_arrows(axes: Axes) -> None:
    """Draw an arrow for each message, to the owner rank and back."""
    for rank, parts in enumerate(fragments()):
        for name, _ in parts:
            owner = OWNERS[name]
            here, there = top(rank) - HEIGHT / 2, top(owner) - HEIGHT / 2
            for start, end in (
                ((COLUMNS["stored"] + WIDTH, here), (COLUMNS["owners"], there)),
                ((COLUMNS["owners"] + WIDTH, there), (COLUMNS["stored again"], here)),
            ):
                arrow = FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, shrinkA=3)
                arrow.set(color=MATRICES[name], linewidth=1.2)
                axes.add_patch(arrow)


def draw(target: Path) -> None:
    figure, axes = plt.subplots(figsize=(10, 5))
    for rank, parts in enumerate(fragments()):
        for column in ("stored", "stored again"):
            draw_stack(axes, COLUMNS[column], rank, parts)
        owned = [(name, float(ROWS[name])) for name, owner in OWNERS.items() if owner == rank]
        draw_stack(axes, COLUMNS["owners"], rank, owned)
        axes.text(-0.15, top(rank) - HEIGHT / 2, f"rank {rank}", ha="right", va="center")
    for column, title in TITLES.items():
        axes.text(COLUMNS[column] + WIDTH / 2, 0.2, title, ha="center", va="bottom")
    for x, text in ((3.7, "momentum:\none all-to-all"), (8.7, "update:\none all-to-all")):
        axes.text(x, 0.2, text, ha="center", va="bottom", style="italic")
    below = top(RANKS - 1) - HEIGHT - 0.25
    axes.text(COLUMNS["owners"] + WIDTH / 2, below, "orthogonalize, batched", ha="center", va="top")
    draw_arrows(axes)
    axes.set(xlim=(-1.2, 12.8), ylim=(below - 0.5, 1.0))
    axes.axis("off")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
