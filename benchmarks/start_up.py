"""How long a training waits for its optimizer: importing it, and building it for many matrices.

Run as ``python -m benchmarks.start_up``. A model of small matrices is built in two processes, and
the optimizer over it; only its construction is timed.
"""

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.about import about, publish
from benchmarks.page.sections import start_up
from benchmarks.rounds import measured, seconds, slowest
from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp

RANKS = 2
MATRICES_OF_LAYER = 6
"""Query, key, value, projection, and two of the feed-forward part."""

STORAGES = {"fragments": True, "whole": False}

_IMPORTS = """
import time
import torch, megatron.core.optimizer, megatron.core.distributed
before = time.perf_counter()
from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
print(time.perf_counter() - before)
"""


def import_seconds(times: int) -> list[float]:
    """Return the seconds that our import takes beyond torch's and megatron-core's."""
    command = [sys.executable, "-W", "ignore", "-c", _IMPORTS]
    return [
        float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(times)
    ]


def build_seconds(matrices: int, times: int, timeout: float) -> dict[str, list[float]]:
    """Return the seconds, of the slowest rank, to build Muon over so many matrices."""
    ranks = run_ranks(RANKS, _on_rank, matrices, times, timeout=timeout, cpu=True)
    return {storage: slowest([rank[storage] for rank in ranks]) for storage in STORAGES}


def _on_rank(matrices: int, times: int) -> dict[str, list[float]]:
    initialize_megatron()

    def build(distributed: bool, round_: int) -> float:
        model: Any = tiny_gpt(
            layers=-(-matrices // MATRICES_OF_LAYER),
            hidden=8,
            heads=2,
            position_embedding="rope",
        )
        chunk = wrap_ddp(model, use_distributed_optimizer=distributed)
        config = EmergingOptimizerConfig(
            optimizer="muon", lr=1e-2, use_distributed_optimizer=distributed
        )
        return seconds(partial(get_megatron_optimizer, config, [chunk]))

    builds = {storage: partial(build, distributed) for storage, distributed in STORAGES.items()}
    return measured(builds, times, warm_up=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start_up", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--matrices", type=int, default=10_000, help="of the model")
    parser.add_argument("--imports", type=int, default=5, help="times that it is imported")
    parser.add_argument("--builds", type=int, default=5, help="times that each is built")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds to build it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    if min(args.matrices, args.imports, args.builds) < 1:
        parser.error("--matrices, --imports and --builds must be at least 1")
    before = about()
    imports = import_seconds(args.imports)
    builds = build_seconds(args.matrices, args.builds, args.timeout)
    figures = {"imports": imports, "matrices": args.matrices, "builds": builds}
    publish(figures, before, args.json, start_up)


if __name__ == "__main__":
    main()
