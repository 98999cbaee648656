"""Measure the CPU time that a build takes, of this package and of Megatron-Core's own.

Run it as ``python -m benchmarks.build_time --json docs/benchmarks/build_time.json``. GPTs of many
small layers in bfloat16 on one gloo process, with sharded state. Each build has a
model of its own, after one that imports what is needed; builds alternate, and the least time
counts.
"""

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from benchmarks.about import about, publish, table
from benchmarks.optimizer_step.arms import STOCK, Arm, wrapped_for
from benchmarks.traced import ARMS as MUONS
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt

ARMS = (
    *MUONS,
    # what ours is derived from, and most of what it cannot save
    Arm(
        "Megatron-Core's Adam, distributed",
        STOCK,
        OptimizerConfig,
        "duplicated",
        "fragments",
        "adam",
    ),
)

LAYERS = (48, 500)
"""Of four matrices each."""


def seconds(number: int, layers: int) -> float:
    """Return the seconds of CPU time that one build takes."""
    model_parallel_cuda_manual_seed(1234)
    sizes: dict[str, Any] = {"layers": layers, "hidden": 32, "position_embedding": "rope"}
    chunk = wrapped_for(ARMS[number].storage, tiny_gpt(dtype=torch.bfloat16, **sizes))
    gc.collect()
    began = time.process_time()
    ARMS[number].optimizer_of(chunk, lr=0.01, bf16=True, params_dtype=torch.bfloat16)
    return time.process_time() - began


def measured(rounds: int) -> dict[int, list[float]]:
    """Return the least seconds of each contestant, by the number of matrices."""
    torch.set_num_threads(1)
    initialize_megatron()
    for number in range(len(ARMS)):
        seconds(number, 2)
    found = {}
    for layers in LAYERS:
        runs = [[seconds(number, layers) for number in range(len(ARMS))] for _ in range(rounds)]
        found[4 * layers] = [min(its) for its in zip(*runs, strict=True)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.build_time", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of builds of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    machine = about()
    (found,) = run_ranks(1, measured, args.rounds, cpu=True, timeout=1200)
    figures = {str(matrices): its for matrices, its in found.items()}
    publish({"seconds": figures}, machine, args.json)
    print(shown(figures))


def shown(figures: dict[str, list[float]]) -> str:
    """Return the table of all figures."""
    rows = [
        (f"{int(matrices):,}", *(f"{its:.2f}" for its in all_of), f"{all_of[0] / all_of[1]:.1f}")
        for matrices, all_of in figures.items()
    ]
    names = " | ".join(f"{arm.name}:" for arm in ARMS)
    return table(f"matrices: | {names} | first to second:", rows)


if __name__ == "__main__":
    main()
