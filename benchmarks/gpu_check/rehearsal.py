"""Run sections on a CPU to the end, with small sizes.

So nothing fails for the first time on a GPU. All sections run in this process, which saves imports.
Triton's interpreter runs kernels where :data:`INTERPRETED` says so.
"""

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.ranks import ranks_on
from benchmarks.gpu_check.section import outcome_of
from tests.harness.kernels import interpreted_kernels

SECONDS = 120.0

INTERPRETED = ("kernels", "step", "overlap", "off_load", "newton_schulz", "reference")
"""Sections of few steps. The interpreter would take minutes for each of the others."""


def rehearse(names: Sequence[str], out: Path) -> dict[str, Outcome]:
    """Return the outcome of each section; its time limit is only told to it."""
    found = {}
    for name in names:
        folder = out / "rehearsal" / name
        folder.mkdir(parents=True, exist_ok=True)
        context = Context("cpu", 1, folder, True, SECONDS, ranks_on("cpu"))
        began = time.perf_counter()
        is_interpreted = name in INTERPRETED
        kernels = interpreted_kernels() if is_interpreted else nullcontext()
        # models and ranks change the environment, which other sections' processes would inherit
        with kernels, mock.patch.dict(os.environ):
            found[name] = outcome_of(name, context)
        told = found[name].problems or [found[name].skipped or found[name].headline]
        seconds = time.perf_counter() - began
        how = "Triton's interpreter" if is_interpreted else "torch's functions"
        state = f"{found[name].status} after {seconds:.0f} s with {how}"
        print(f"{name}: {state}, {'; '.join(told)}", flush=True)
    return found
