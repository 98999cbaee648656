"""The report of what memory is used for says what tensors are seen to take."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.testing.scene import forget_megatron
from megatron_eopt.wrappers.memory import Memory
from tests.harness.each_rank import on_ranks
from tests.unit.storage.full_state import Case, optimizer_over, steps
from tests.unit.storage.runs import make_chunk

MODEL = {"layers": 2, "hidden": 64, "heads": 4, "query_groups": 2}
ADAMUON = {"adaptive_muon_moment2_method": "adamuon"}
OFF_LOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
CASES = {
    "muon": Case("muon", MODEL),
    "adamuon": Case("adaptive_muon", MODEL | {"gated": True}, config=ADAMUON),
    "8 bits": Case("muon", MODEL, config={"muon_momentum_dtype": "int8"}),
    "soap": Case("soap", MODEL),
    "adam": Case("adam", MODEL),
    "replicated": Case("muon", MODEL),
    "off-loaded": Case("muon", MODEL, config=OFF_LOADED),
}


SCALARS = 512
"""Bytes of what has no dimensions: norms that are let go again, counters of steps."""


def counted(case: Case) -> tuple[int, Any]:
    """Return how tensors grow until the first step is done, and the report."""
    chunk = make_chunk(case.run)
    with LiveBytes() as seen:
        optimizer = optimizer_over(case, [chunk])
    grown = seen.grown
    with LiveBytes() as seen:
        steps(case, chunk, optimizer, 0, 1)
    grown += seen.grown
    steps(case, chunk, optimizer, 1, 2)
    return grown, optimizer.memory()


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16],
    ids=["fp32", "bf16"],
)
@on_ranks(2, timeout=280)
def test_the_report_counts_what_is_allocated(dtype):
    for name, case in CASES.items():
        sharded = {"use_distributed_optimizer": name != "replicated"}
        model, config = {**case.model, "dtype": dtype}, {**case.config, **sharded}
        grown, memory = counted(replace(case, model=model, ddp=sharded, config=config))
        living = memory.main_weights + memory.state + memory.buffers + memory.host
        assert abs(grown - living) <= SCALARS, name
        assert (memory.main_weights > 0) == (dtype == torch.bfloat16)
        assert (memory.host > 0) == (name == "off-loaded")
        assert memory.gradients >= memory.weights > 0
        forget_megatron()


def test_host_memory_does_not_count_as_the_device_s():
    kinds = dict.fromkeys(("weights", "gradients", "main_weights", "state", "buffers"), 1)
    assert Memory(**kinds, host=100).total == 5
    assert Memory(**kinds, host=100, transient=2).total == 7
