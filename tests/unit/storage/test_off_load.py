"""Main weights and state in the host's memory: the same update, and less on the device."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed

from megatron_eopt.layouts import redistribution
from megatron_eopt.optimizers.host_memory import HostMemory
from megatron_eopt.testing.scene import forget_megatron
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long
from tests.unit.storage import full_state
from tests.unit.storage.full_state import Case, build, differences, load, resume, save, steps, write
from tests.unit.storage.runs import inject

MODEL = {"layers": 2, "hidden": 32, "heads": 4, "query_groups": 2}
MOE = {**MODEL, "experts": 4, "moe_grouped_gemm": False}
SMALL = {"matrix_buffer_mb": 1 / 128}
CASES = {
    "muon": Case("muon", MODEL, config=SMALL),
    "adamuon": Case("adaptive_muon", MOE, config=SMALL),
    "soap": Case("soap", MODEL, config=SMALL),
}
"""The conformance test off-loads every optimizer; here is what only several fractions show."""
FRACTIONS = (0.0, 0.5, 1.0)


def at(case: Case, dtype: torch.dtype, fraction: float) -> Case:
    off_load = {"optimizer_cpu_offload": fraction > 0, "optimizer_offload_fraction": fraction}
    model, config = {**case.model, "dtype": dtype}, {**case.config, **off_load}
    return replace(case, model=model, config=config, ddp={"use_distributed_optimizer": True})


def trained(case: Case) -> tuple[dict[str, Any], Any]:
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 10)
    state, memory = full_state.full_state(case, chunk, optimizer), optimizer.memory()
    forget_megatron()
    return state, memory


@pytest.mark.parametrize("dtype", mostly_long([torch.float32, torch.bfloat16], torch.bfloat16))
@pytest.mark.parametrize("name", mostly_long(CASES, "muon"))
@on_ranks(2, timeout=300)
def test_ten_steps_equal_those_of_a_resident_run(name, dtype):
    found = [trained(at(CASES[name], dtype, fraction)) for fraction in FRACTIONS]
    assert not any(differences(found[0][0], state) for state, _ in found)
    resident, half, everything = (memory for _, memory in found)
    moved = resident.state + (resident.main_weights if dtype != torch.float32 else 0)
    # counters of steps stay, and statistics of rows, which are no part of fragments
    assert 0.95 * moved <= everything.host <= moved
    # whole tensors are chosen
    assert 0.3 * moved <= half.host <= 0.5 * moved
    for memory in (half, everything):
        kept = memory.state + memory.main_weights + memory.host
        assert kept == resident.state + resident.main_weights


@pytest.mark.parametrize(
    ("before", "after"), [(0.5, 1.0), pytest.param(1.0, 0.0, marks=pytest.mark.long)]
)
@on_ranks(2, timeout=300)
def test_checkpoints_are_those_of_a_resident_run(tmp_path, before, after):
    """Two of four steps follow a resumption at another fraction."""
    case, dtype = CASES["adamuon"], torch.bfloat16
    save([at(case, dtype, before)], tmp_path)
    found = load([at(case, dtype, after)], tmp_path, further=2)
    chunk, optimizer = build(at(case, dtype, 0.0))
    steps(case, chunk, optimizer, 0, 4)
    whole = full_state.full_state(case, chunk, optimizer)
    assert distributed.get_rank() != 0 or not differences(whole, found[0])


@pytest.mark.parametrize("name", ["muon", pytest.param("soap", marks=pytest.mark.long)])
@on_ranks(2)
def test_what_a_step_that_failed_had_brought_is_not_used(name, tmp_path):
    """A step ends in an error, and a checkpoint from before is loaded."""
    case = CASES[name]
    whole, broken = at(case, torch.bfloat16, 0.0), at(case, torch.bfloat16, 0.5)
    chunk, optimizer = build(whole)
    steps(whole, chunk, optimizer, 0, 4)
    expected = full_state.full_state(whole, chunk, optimizer)
    forget_megatron()
    chunk, optimizer = build(broken)
    steps(broken, chunk, optimizer, 0, 2)
    write(broken, chunk, optimizer, tmp_path)
    steps(broken, chunk, optimizer, 2, 3)
    ends = patch.object(redistribution, "WaveBatch", side_effect=torch.OutOfMemoryError)
    with ends, pytest.raises(torch.OutOfMemoryError):
        steps(broken, chunk, optimizer, 3, 4)
    resume(broken, tmp_path, make=lambda *_: (chunk, optimizer))
    steps(broken, chunk, optimizer, 2, 4)
    assert not differences(expected, full_state.full_state(broken, chunk, optimizer))


@on_ranks(1)
def test_a_member_that_steps_alone_gives_gradients_to_off_loaded_weights():
    """Off-loaded weights are replaced while they get gradients."""
    case = at(CASES["muon"], torch.bfloat16, 1.0)
    chunk, optimizer = build(case)
    inject(case.run, chunk, 0)
    stand_in = HostMemory.stood_in_for
    with patch.object(HostMemory, "stood_in_for", autospec=True, side_effect=stand_in) as calls:
        for member in optimizer.chained_optimizers:
            member.step()
    # a GPU refuses a gradient on another device than its tensor; a CPU has one device only
    assert calls.call_count == 2
