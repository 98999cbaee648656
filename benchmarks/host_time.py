"""Measure the CPU time of a step apart from arithmetic: what a GPU would wait for.

Run it as ``python -m benchmarks.host_time --json docs/benchmarks/host_time.json``. Matrices have 32
rows or columns, so arithmetic costs little, in bfloat16 under Megatron and in float32 in your own
loop. Arms take turns, and the median counts. ``ours, launches`` is the path of a GPU whose kernels
do nothing. Only Megatron runs on the CPU back end, which makes each call of torch several times as
slow.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer import OptimizerConfig
from torch import nn
from tqdm import tqdm

from benchmarks.about import about, publish, table
from benchmarks.optimizer_step.arms import OURS, STOCK, Arm, wrapped_for
from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.base import kernels
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt

PER_LAYER = 4
SIZES = (192, 2000)
"""Matrices of a model, four in each layer."""

LAUNCHES = "ours, launches"

UNDER_MEGATRON = {
    "Muon, ZeRO-1": (
        Arm("ours", OURS, EmergingOptimizerConfig, "auto", "fragments"),
        Arm(LAUNCHES, OURS, EmergingOptimizerConfig, "auto", "fragments"),
        Arm("stock, layer-wise", STOCK, OptimizerConfig, "duplicated", "padded"),
    ),
    "Adam, ZeRO-1": (
        Arm("ours", OURS, EmergingOptimizerConfig, "auto", "fragments", optimizer="adam"),
        Arm("stock", STOCK, OptimizerConfig, "auto", "fragments", optimizer="adam"),
    ),
}
IN_OWN_LOOP: dict[str, dict[str, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "Muon, own loop": {
        "ours": lambda model: build_optimizer(model, _config("muon")),
        LAUNCHES: lambda model: build_optimizer(model, _config("muon")),
        "torch": lambda model: torch.optim.Muon(model.parameters(), lr=1e-3),
    },
    "Adam, own loop": {
        "ours": lambda model: build_optimizer(model, _config("adam")),
        LAUNCHES: lambda model: build_optimizer(model, _config("adam")),
        "torch, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    },
}


def _config(optimizer: str) -> EmergingOptimizerConfig:
    return EmergingOptimizerConfig(optimizer=optimizer, lr=1e-3, clip_grad=0.0)


@contextmanager
def launches() -> Iterator[None]:
    """Let kernels seem to run in a block; they do nothing."""

    def runs(*_: Any) -> bool:
        return True

    def call(*_: Any, **__: Any) -> None:
        pass

    # functions, since a mock that notes its calls takes longer than what it stands for
    with (
        mock.patch.object(kernels.Family, "runs", runs),
        mock.patch.object(kernels.Family, "call", call),
    ):
        yield


def _under_megatron(arm: Arm, matrices: int) -> Any:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"layers": matrices // PER_LAYER, "hidden": 32, "heads": 2}
    model = tiny_gpt(dtype=torch.bfloat16, vocabulary=64, position_embedding="rope", **sizes)
    chunk = wrapped_for(arm.storage, model)
    optimizer = arm.optimizer_of(chunk, lr=1e-3, bf16=True, params_dtype=torch.bfloat16)
    for param in chunk.parameters():
        param.main_grad.normal_()
    return optimizer


def _in_own_loop(make: Callable[[nn.Module], Any], matrices: int) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(matrices)))
    optimizer = make(model)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return optimizer


def timed(optimizers: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return the milliseconds of CPU time of a step, by arm."""
    found: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            with launches() if name == LAUNCHES else nullcontext():
                began = time.process_time()
                optimizer.step()
                found[name].append(1e3 * (time.process_time() - began))
    # the first steps create state and buffers
    return {name: statistics.median(values[2:]) for name, values in found.items()}


def under_megatron(case: str, matrices: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds of the arms of a case under Megatron."""
    initialize_megatron()
    arms = UNDER_MEGATRON[case]
    return timed({arm.name: _under_megatron(arm, matrices) for arm in arms}, rounds)


def in_own_loop(case: str, matrices: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds of the arms of a case in your own loop."""
    makers = IN_OWN_LOOP[case].items()
    return timed({name: _in_own_loop(make, matrices) for name, make in makers}, rounds)


def measured(matrices: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of all arms by case."""
    # the CPU back end, which Megatron needs without a GPU, looks into each call of torch
    return {
        case: run_ranks(1, measure, case, matrices, rounds, cpu=needs_cpu)[0]
        for cases, measure, needs_cpu in (
            (UNDER_MEGATRON, under_megatron, True),
            (IN_OWN_LOOP, in_own_loop, False),
        )
        for case in cases
    }


def shown(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the table of all figures, by number of matrices."""
    rows = [
        [case, arm, *(f"{by_case[case][arm]:.1f}" for by_case in figures.values())]
        for case, arms in next(iter(figures.values())).items()
        for arm in arms
    ]
    return table(" | ".join(["step", "arm", *(f"{n} matrices, ms:" for n in figures)]), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each arm")
    options, before = parser.parse_args(), about()
    figures = {str(size): measured(size, options.rounds) for size in tqdm(SIZES, desc="sizes")}
    print(shown(figures))
    publish({"milliseconds": figures}, before, options.json)


if __name__ == "__main__":
    main()
