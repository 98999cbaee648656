"""Run sections on a CPU to the end, with small sizes and Triton's interpreter.

So nothing fails for the first time on a GPU. All sections run in this process, which saves imports.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.ranks import ranks_on
from benchmarks.gpu_check.section import outcome_of
from tests.harness.kernels import interpreted_kernels

SECONDS = 120.0


def rehearse(names: Sequence[str], out: Path) -> dict[str, Outcome]:
    """Return the outcome of each section; its time limit is only told to it."""
    found = {}
    for name in names:
        folder = out / "rehearsal" / name
        folder.mkdir(parents=True, exist_ok=True)
        context = Context("cpu", 1, folder, True, SECONDS, ranks_on("cpu"))
        began = time.perf_counter()
        with interpreted_kernels():
            found[name] = outcome_of(name, context)
        told = found[name].problems or [found[name].skipped or found[name].headline]
        seconds = time.perf_counter() - began
        print(f"{name}: {found[name].status} after {seconds:.0f} s, {'; '.join(told)}", flush=True)
    return found
