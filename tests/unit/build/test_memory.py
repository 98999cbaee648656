"""The report of what memory is used for says what tensors are seen to take."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.build.memory import Memory
from tests.harness import run_ranks
from tests.unit.stores.full_state import Case, inject, optimizer_over, steps
from tests.unit.stores.runs import make_chunk

MODEL = {"layers": 2, "hidden": 64, "heads": 4, "query_groups": 2}
CASES = {
    "muon": Case("muon", MODEL),
    "adaptive muon": Case("adaptive_muon", MODEL),
    "adamuon": Case(
        "adaptive_muon", MODEL | {"gated": True}, config={"adaptive_muon_moment2_method": "adamuon"}
    ),
    "namo": Case("adaptive_muon", MODEL, config={"adaptive_muon_moment2_method": "namo"}),
    "8 bits": Case("muon", MODEL, config={"muon_momentum_dtype": "int8"}),
    "soap": Case("soap", MODEL),
    "adam": Case("adam", MODEL),
    "replicated": Case("muon", MODEL),
    "off-loaded": Case(
        "muon",
        MODEL,
        config={"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
    ),
}


SCALARS = 512
"""Bytes of what has no dimensions: norms that are let go again, counters of steps."""


def counted(case: Case) -> tuple[int, Any, int]:
    """Return how tensors grow until the first step is done, the report, and a third step's peak."""
    chunk = make_chunk(case.run)
    with LiveBytes() as seen:
        optimizer = optimizer_over(case, [chunk])
    grown = seen.grown
    with LiveBytes() as seen:
        steps(case, chunk, optimizer, 0, 1)
    grown += seen.grown
    steps(case, chunk, optimizer, 1, 2)
    memory = optimizer.memory()
    optimizer.zero_grad()
    inject(case.run, chunk, 2)
    with LiveBytes() as seen:
        optimizer.step()
    return grown, memory, seen.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_the_report_counts_what_is_allocated(name, dtype):
    case = CASES[name]
    sharded = {"use_distributed_optimizer": name != "replicated"}
    config = {**case.config, **sharded, "log_optimizer_memory": True}
    case = replace(case, model={**case.model, "dtype": dtype}, ddp=sharded, config=config)
    for grown, memory, peak in run_ranks(2, counted, case):
        living = memory.main_weights + memory.state + memory.buffers + memory.host
        assert abs(grown - living) <= SCALARS
        assert abs(memory.transient - peak) <= SCALARS
        assert (memory.main_weights > 0) == (dtype == torch.bfloat16)
        assert (memory.host > 0) == (name == "off-loaded")
        assert memory.gradients >= memory.weights > 0


def test_the_report_is_one_line():
    memory = Memory(2**20, 2**21, 0, 2**19, 0, 0)
    assert str(memory) == (
        "MiB of a rank: weights 1.0, gradients 2.0, main_weights 0.0, state 0.5, buffers 0.0, "
        "host 0.0"
    )


class Cycle:
    """Holds bytes until the garbage collector finds it."""

    def __init__(self) -> None:
        self.itself, self.held = self, torch.empty(1 << 20, dtype=torch.uint8)


def test_garbage_of_before_hides_nothing():
    Cycle()
    with LiveBytes() as live:
        gc.collect()
        torch.empty(1 << 19, dtype=torch.uint8)
    assert live.peak == 1 << 19
