"""Thousands of steps: no memory and no descriptor is lost."""

import gc
import os
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.harness.models import forward_backward, synthetic_batch
from tests.unit.storage.runs import OVERLAP, Run, make_chunk, make_optimizer

pytestmark = pytest.mark.long

STEPS, EARLY = 2000, 500

# what the allocator may still take in 1,500 steps; a lost tensor of one matrix would be 6 MB
GROWTH_MB = 2.0

RUN = Run(
    model={"layers": 1, "hidden": 32, "heads": 4, "query_groups": 2, "gated": True},
    ddp=OVERLAP | {"bucket_size": 3000},
    config={"overlap_param_gather": True},
    steps=STEPS,
)


def resources() -> tuple[float, int]:
    """Return the resident set of this process in MB and its number of open descriptors."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir("/proc/self/fd"))


def soak(run: Run) -> dict[int, tuple[float, int]]:
    """Train, and return what is held after some of the steps."""
    chunk = make_chunk(run)
    optimizer = make_optimizer(run, chunk)
    held = {}
    for step in range(1, run.steps + 1):
        optimizer.zero_grad()
        forward_backward([chunk], [synthetic_batch(step)])
        done, _, _ = optimizer.step()
        assert done
        if step in (EARLY, STEPS):
            held[step] = resources()
    return held


def test_2000_steps_on_two_ranks(record_property):
    for rank, held in enumerate(run_ranks(2, soak, RUN, timeout=540)):
        (early, early_open), (late, late_open) = held[EARLY], held[STEPS]
        record_property(f"rank {rank}, MB", f"{early:.1f} -> {late:.1f}")
        record_property(f"rank {rank}, descriptors", f"{early_open} -> {late_open}")
        assert late - early < GROWTH_MB
        assert late_open <= early_open
