"""Compare the measured memory of a step with the optimizer's own count."""

import gc
from typing import Any

import torch

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.models import LARGE, build, give_gradients
from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.wrappers.memory import Memory

SHARE, SLACK = 0.15, 64 * 2**20
"""Allowed difference from the count: a share of it plus a number of bytes. Allocators round up, and
libraries keep workspaces of some tens of MiB."""

SLACK_ON_CPU = 4096
SMALL: dict[str, Any] = {"hidden": 64, "heads": 8, "query_groups": 4}
OPTIMIZERS = ("muon", "adam")
_MIB = 2**20


def run(context: Context) -> Outcome:
    """Measure each optimizer on a model of half a billion weights, or on a small one."""
    outcome, told = context.outcome, []
    model = SMALL if context.small else LARGE
    on_gpu = context.device == "cuda"
    slack = SLACK if on_gpu else SLACK_ON_CPU
    for name in OPTIMIZERS:
        with outcome.noting(name):
            ranks = context.on_ranks(context.ranks if on_gpu else 1, measured, name, model, on_gpu)
            outcome.figures[name] = ranks
            for rank, found in enumerate(ranks):
                outcome.problems += [f"{name}, rank {rank}: {text}" for text in wrong(found, slack)]
            peaks = (ranks[0][key] / _MIB for key in ("peak", "counted peak"))
            told.append("{} needs {:.1f} MiB for a step, counted {:.1f}".format(name, *peaks))
    outcome.headline = "; ".join(told)
    return outcome


def wrong(found: dict[str, int | None], slack: int) -> list[str]:
    """Return which measurements are too far from their counts, as sentences.

    Args:
        found: Measured and counted bytes; None if a value cannot be measured.
        slack: Bytes by which they may differ in addition to :data:`SHARE`.
    """
    sentences = []
    for name in ("peak", "standing"):
        measurement, count = found[name], found[f"counted {name}"]
        if measurement is None or count is None:
            continue
        if abs(measurement - count) > SHARE * count + slack:
            sentences.append(
                f"{name} of {measurement / _MIB:.1f} MiB, {count / _MIB:.1f} were counted"
            )
    return sentences


def measured(name: str, model: dict[str, Any], on_gpu: bool) -> dict[str, int | None]:
    """Return this rank's standing memory and the additional peak of a step, in bytes."""
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    chunk, optimizer = build(model, {"optimizer": name})
    # the first step also allocates what remains
    for step in range(2):
        give_gradients(chunk, step)
        with LiveBytes() as counted:
            optimizer.step()
        optimizer.zero_grad()
    memory: Memory = optimizer.memory()
    give_gradients(chunk, 2)
    standing = None
    if on_gpu:
        torch.cuda.synchronize()
        at_rest = torch.cuda.memory_allocated()
        standing = at_rest - before
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - at_rest
    else:
        with LiveBytes() as seen:
            optimizer.step()
        peak = seen.peak
    parts = (memory.weights, memory.gradients, memory.main_weights, memory.state, memory.buffers)
    return {
        "peak": peak,
        "counted peak": counted.peak,
        "standing": standing,
        "counted standing": sum(parts),
    }
