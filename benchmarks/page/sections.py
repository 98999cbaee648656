"""What each file of figures becomes on the page: a heading, how it is measured, a table."""

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.page.comparison import comparison
from benchmarks.page.gpu import gpu_check
from benchmarks.page.markdown import machine, prose, quartiles, table

type Figures = dict[str, Any]


def steps(figures: Figures) -> str:
    """Write what one optimizer step computes and sends."""
    rows = [
        [
            *(one["section"], one["name"], f"{one['gigaflops']:.1f}", f"{one['megabytes']:.1f}"),
            *(str(one["calls"]), f"{one['apart']:.0e}" if one["apart"] else ""),
        ]
        for one in figures["steps"]
    ]
    text = f"""## One optimizer step, counted

    `python -m benchmarks.optimizer_step --json FILE`: a bfloat16 GPT with 4 layers and hidden size
    512, the same injected gradients. Operations of matrix products, bytes that are sent and
    collective calls are those of the rank that has most of them, in one step. *Apart* is how far
    weights are from ours after three steps, as a part of the way they went: products are in
    bfloat16, which rounds. {machine(figures)}"""
    head = "layout | optimizer | GFLOP: | MB sent: | calls: | apart:"
    return f"{prose(text)}\n{table(head, rows)}"


def checkpoints(figures: Figures) -> str:
    """Write saving and loading against stock's."""
    rows = []
    for number, one in enumerate(figures["arms"]):
        cells = [one["name"], f"{one['bytes'] / 1e6:.0f}"]
        for what in ("save", "load"):
            ratio = quartiles(one[f"{what}_ratio"]) if number else "1"
            cells += [f"{statistics.median(one[what]):.2f}", ratio]
        rows.append(cells)
    before = f"""## Checkpoints

    `python -m benchmarks.checkpoints --json FILE`: model and optimizer of the dense GPT above
    (DP 2), by megatron-core's `dist_checkpointing`. {machine(figures)}"""
    head = "optimizer | MB: | save s: | x ours (quartiles): | load s: | x ours (quartiles):"
    return f"{prose(before)}\n{table(head, rows)}"


SECTIONS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("gpu_check.json", gpu_check),
    ("optimizer_step.json", steps),
    ("compare_optimizers.json", comparison),
    ("checkpoints.json", checkpoints),
)
"""Files of figures, in the order of the page."""
