"""Compare a step whose state is in host memory with one on the device: bits, time and memory."""

import statistics
from typing import Any

import torch

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.models import LARGE, build, give_gradients
from benchmarks.rounds import milliseconds
from megatron_eopt.base import gpu

SMALL: dict[str, Any] = {"layers": 1, "hidden": 64, "heads": 8, "query_groups": 4}
STEPS, SMALL_STEPS = 5, 2
FRACTIONS = (0.0, 1.0)


def run(context: Context) -> Outcome:
    """Step both ways; the weights must have equal bits."""
    outcome = context.outcome
    model = SMALL | {"dtype": torch.bfloat16} if context.small else LARGE
    steps = SMALL_STEPS if context.small else STEPS
    found: dict[float, Any] = {}
    for fraction in FRACTIONS:
        with outcome.noting(f"fraction {fraction}"):
            ranks = context.on_ranks(context.ranks, stepped, model, fraction, steps)
            found[fraction] = ranks
            outcome.figures[f"fraction {fraction}"] = {
                "milliseconds": max(rank["milliseconds"] for rank in ranks),
                "peak": max(rank["peak"] for rank in ranks),
            }
    if len(found) == len(FRACTIONS):
        sums = [[rank["sums"] for rank in ranks] for ranks in found.values()]
        if sums[0] != sums[1]:
            outcome.problems.append("weights differ from those of a step on the device")
        ways = zip(("on the device", "off-loaded"), outcome.figures.values(), strict=True)
        outcome.headline = "; ".join(
            f"{way} {one['milliseconds']:.3g} ms, peak {one['peak'] / 2**20:.0f} MiB"
            for way, one in ways
        )
    return outcome


def stepped(model: dict[str, Any], fraction: float, steps: int) -> dict[str, Any]:
    """Return this rank's milliseconds a step, peak memory, and sums of its weights."""
    fields = {"optimizer_cpu_offload": fraction > 0, "optimizer_offload_fraction": fraction}
    chunk, optimizer = build(model, fields)
    times = []
    for step in range(steps):
        give_gradients(chunk, step)
        if step == 1 and gpu.is_there():
            torch.cuda.reset_peak_memory_stats()
        times.append(milliseconds(optimizer.step))
    peak = torch.cuda.max_memory_allocated() if gpu.is_there() else 0
    sums = [float(param.double().sum()) for param in chunk.parameters()]
    return {"milliseconds": statistics.median(times[1:]), "peak": peak, "sums": sums}
