"""Plans: the real optimizer, run dry as the busiest rank, and what its step takes on paper."""

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.tools.dry_run import Collective, dry_world, report_of
from megatron_eopt.tools.plan.architectures import Architecture, from_flags
from megatron_eopt.tools.plan.cost import collective_seconds, times
from megatron_eopt.tools.plan.machine import MACHINES
from megatron_eopt.tools.plan.model import ParallelLayout, build_stage
from megatron_eopt.tools.plan.planning import plan
from megatron_eopt.tools.plan.tables import Sources, as_dict, show_plan
from megatron_eopt.tools.recipe import recipe
from megatron_eopt.wrappers.factory import get_megatron_optimizer
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long
from tests.unit.plan.test_model import DENSE, MIXED, changed

CUT = ParallelLayout(tensor=2, pipeline=2, data=4)
SHARDED: dict[str, Any] = {"lr": 0.01, "bf16": True, "use_distributed_optimizer": True}

HALVED = changed(MIXED, moe_ffn_hidden_size=32, moe_shared_expert_intermediate_size=48)
"""All matrices have sizes of which kernels compute half of symmetric products."""


def planned(architecture: Architecture, layout: ParallelLayout, fields: Any) -> dict[str, Any]:
    dist.destroy_process_group()
    config = EmergingOptimizerConfig(**({"optimizer": "muon"} | SHARDED | fields))
    return as_dict(plan(architecture, layout, MACHINES["H100"], config, tokens=2**22))


def in_a_process(*case: Any, **fields: Any) -> dict[str, Any]:
    return run_ranks(1, planned, *case, fields, timeout=300, cpu=False)[0]


@pytest.mark.parametrize(
    "optimizer", mostly_long(["soap", "scion", "adaptive_muon", "adam"], "soap", "adam")
)
def test_other_optimizers_are_planned(optimizer):
    found = in_a_process(DENSE, replace(CUT, pipeline=1, data=2), optimizer=optimizer)
    rank = found["busiest_rank"]
    for owns in rank["owns"].values():
        computed, _, matrices, *_ = owns.split()
        assert 0 < int(computed) <= int(matrices)
    assert bool(rank["owns"]) == (optimizer != "adam")
    assert found["seconds"]["step"] > 0
    # Adam, to which others are compared, is run as well
    assert (found["adam_seconds"] == found["seconds"]["step"]) == (optimizer == "adam")
    counted = found["counted"]
    assert found["seconds"]["elements"] == counted["in_all"]["bytes"] / MACHINES["H100"].memory
    # what an optimizer does is told apart from what is done for all
    by = {phase["optimizer"] for phase in counted["phases"]}
    assert by - {None} == (set() if optimizer == "adam" else set(counted["elements"]))


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        pytest.param(DENSE, CUT, marks=pytest.mark.long),
        pytest.param(HALVED, replace(CUT, expert=2), marks=pytest.mark.long),
        (HALVED, replace(CUT, expert=2, instances=2)),
    ],
    ids=["dense", "experts", "instances"],
)
def test_a_plan_is_of_the_busiest_rank(architecture, layout):
    found = in_a_process(architecture, layout)
    rank = found["busiest_rank"]
    first = min(found["stages"], key=lambda stage: -stage["estimated_flops"])
    assert rank["rank"] == first["busiest"]
    # small matrices are computed by the book, but half of symmetric products
    assert 0.6 < found["counted"]["in_all"]["flops"] / first["estimated_flops"] < 0.8
    assert sum(len(stage["stages"]) for stage in found["stages"]) == layout.pipeline
    assert rank["host_reads"] == {}
    assert 0 < found["share_of_iteration"] < 1
    assert found["adam_seconds"] > 0
    # Adam is counted on the rank that holds most, which may be another one
    fullest = found["fullest_rank"]["memory"]
    assert found["adam_memory"]["gradients"] == fullest["gradients"]
    assert found["adam_memory"]["buffers"] == 0
    json.dumps(found)


def shown(optimizer: str) -> tuple[dict[str, Any], list[str]]:
    """Return a plan on one rank, as values and as the lines that are printed."""
    config = EmergingOptimizerConfig(optimizer=optimizer, **SHARDED)
    found = plan(DENSE, ParallelLayout(), MACHINES["H100"], config, tokens=2**22)
    console = Console(file=StringIO(), width=120, markup=False)
    show_plan(found, "H100", Sources(2**22, 1, {}, []), console)
    return as_dict(found), console.file.getvalue().splitlines()


@on_ranks(1, cpu=False)
def test_a_plan_begins_with_what_the_optimizer_costs_beside_adam():
    dist.destroy_process_group()
    (muon, lines), (adam, others) = map(shown, ("muon", "adam"))
    assert "muon beside Adam, predicted for H100" in lines[1]
    assert not any("beside Adam" in line for line in others)
    rows = [line.replace("│", " ").split() for line in lines[5:9]]
    assert [row[0] for row in rows[:3]] == ["muon", "adam", "difference"]
    # Adam's numbers are those of its own plan
    assert muon["adam_seconds"] == adam["seconds"]["step"]
    assert muon["adam_iteration_seconds"] == adam["iteration_seconds"]
    assert muon["adam_memory"] == adam["fullest_rank"]["memory"]
    for row, one in zip(rows, (muon, adam), strict=False):
        memory = one["fullest_rank"]["memory"]
        peak = sum(memory.values()) - memory["host"]
        kept = peak - memory["buffers"] - memory["transient"]
        times = [1e3 * one["seconds"]["step"], 1e3 * one["iteration_seconds"]]
        assert row[1:] == [f"{n:,.2f}" for n in (*times, kept / 2**30, peak / 2**30)]
    longer = muon["iteration_seconds"] / adam["iteration_seconds"] - 1
    assert rows[3][0] == f"{longer:+.2%}"
    # one momentum instead of two moments
    kept = ("weights", "gradients", "main_weights", "state")
    memory = muon["fullest_rank"]["memory"]
    assert sum(memory[kind] for kind in kept) < sum(muon["adam_memory"][kind] for kind in kept)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-3-8b", ParallelLayout(data=256)),
        ("llama-3-8b", ParallelLayout(data=1024)),
        ("deepseek-v3", ParallelLayout(pipeline=16, data=128, expert=64, expert_tensor=1)),
    ],
    ids=["Llama-3-8B, 256 ranks", "Llama-3-8B, 1024 ranks", "DeepSeek-V3, 128 ranks a stage"],
)
@pytest.mark.long
def test_where_ranks_outnumber_matrices_teams_have_less_to_do(name, layout, record_property):
    shape = recipe(name).architecture()
    whole, teams = (in_a_process(shape, layout, muon_max_ranks_per_matrix=k) for k in (1, 8))
    counted = whole["counted"]["in_all"]["flops"] / teams["counted"]["in_all"]["flops"]
    record_property("counted FLOPs", f"{counted:.2f} times less")
    predicted = whole["seconds"]["step"] / teams["seconds"]["step"]
    record_property("predicted step", f"{predicted:.2f} times faster")
    # a team computes small matrices whole, by rows, and only one rank halves symmetric products
    assert counted >= 1.5
    assert predicted > 1.1


@on_ranks(1, cpu=False)
def test_waves_hide_what_travels_behind_work():
    """By a slow and by a fast GPU."""
    dist.destroy_process_group()
    config = EmergingOptimizerConfig(optimizer="muon", matrix_buffer_mb=0.004, **SHARDED)
    with dry_world(0, 4):
        model = build_stage(DENSE, ParallelLayout(data=4))
        report = report_of(get_megatron_optimizer(config, [model]), lambda: None)
        # each way takes one second, whatever travels
        gpu = replace(MACHINES["H100"], latency=1.0, link=1e30, network=1e30)
        waves = sum(len(schedule.plan.waves) for _, schedule in report.schedules)
        slow, fast = (times(report, replace(gpu, flops=flops)) for flops in (1.0, 1e30))
    schedules = len(report.schedules)
    assert waves > 2 * schedules
    assert slow.travel == pytest.approx(2 * waves)
    # the first way in and the last one out are seen
    assert slow.exposed == pytest.approx(2 * schedules)
    # nothing to compute meanwhile: ways out hide behind the next ways in
    assert fast.exposed == pytest.approx(waves + schedules)


def test_collectives_take_latency_and_the_slower_link():
    gpu = replace(MACHINES["H100"], latency=1.0, link=100.0, network=10.0)
    assert collective_seconds(Collective("alltoall_base", 8, 200, 0, 7), gpu) == 3
    assert collective_seconds(Collective("alltoall_base", 16, 200, 0, 15), gpu) == 21
    assert collective_seconds(Collective("allgather_base", 4, 100, 8, 14), gpu) == 4
    assert collective_seconds(Collective("allreduce", 4, 100, 0, 6), gpu) == 2.5
    # few ranks, on several computers: every 64th one, and four on both sides of a border
    assert collective_seconds(Collective("allgather_base", 4, 100, 0, 192), gpu) == 31
    assert collective_seconds(Collective("allreduce", 4, 100, 6, 9), gpu) == 16


def test_collectives_know_where_their_ranks_are():
    rank = in_a_process(MIXED, ParallelLayout(data=4, expert=2))["busiest_rank"]
    name = "allgather_into_tensor_coalesced"
    gathers = [call for call in rank["collectives"] if call["name"] == name]
    for call in gathers:
        # in a ring, each rank sends the shards of all others on
        assert call["bytes_sent"] == call["sent"] * (call["ranks"] - 1) * call["calls"]
    experts = rank["rank"] % 2
    places = {(call["ranks"], call["first"], call["last"]) for call in gathers}
    assert places == {(4, 0, 3), (2, experts, experts + 2)}


PURPOSES = {"gradient norm", "matrices to owners and back", "shared matrices", "stepped weights"}
USES = {
    "adaptive": {"optimizer": "adaptive_muon"},
    "overlap": {"muon_overlap_dp_comm": True},
    "teams": {"muon_tp_mode": "distributed", "muon_max_ranks_per_matrix": 8},
    "soap": {"optimizer": "soap"},
}


@pytest.mark.parametrize("use", USES)
def test_collectives_say_what_they_are_for(use):
    found = in_a_process(HALVED, replace(CUT, pipeline=1, expert=2), **USES[use])
    calls = found["busiest_rank"]["collectives"]
    assert {call["purpose"] for call in calls} <= PURPOSES
    assert {"gradient norm", "stepped weights"} <= {call["purpose"] for call in calls}


def test_a_machine_needs_positive_numbers():
    numbers = {"link": 0.0, "memory": -1.0, "efficiency": 1.5, "utilization": 1.5}
    for name, value in numbers.items():
        with pytest.raises(ConfigurationError, match=rf"machine\.{name}={value}"):
            replace(MACHINES["H100"], **{name: value})


@pytest.mark.long
def test_a_step_beside_communication_ends_with_adams():
    short = recipe("llama-3-8b").architecture(num_layers=8)
    apart = in_a_process(short, ParallelLayout(data=16))
    beside = in_a_process(short, ParallelLayout(data=16), muon_overlap_dp_comm=True)
    adams = beside["adam_iteration_seconds"] - beside["seconds"]["train_step"]
    assert apart["seconds"]["tail"] > 1.1 * adams
    assert beside["seconds"]["gather"] < beside["seconds"]["tail"] < 1.03 * adams
    assert apart["adam_seconds"] == beside["adam_seconds"]


GPT_0_5B = from_flags(
    {
        "num_layers": 8,
        "hidden_size": 2048,
        "ffn_hidden_size": 8192,
        "num_attention_heads": 16,
        "vocab_size": 32768,
        "untie_embeddings_and_output_weights": True,
    }
)


@pytest.mark.parametrize(("groups", "tflop"), [(None, 11.0), (8, 8.8)])
def test_a_gpu_s_step_stays_below_its_bars(groups, tflop):
    shape = changed(GPT_0_5B, num_query_groups=groups) if groups else GPT_0_5B
    counted = in_a_process(shape, ParallelLayout())["counted"]
    total, moved = counted["in_all"], counted["bytes_per_element"]
    assert total["flops"] <= tflop * 1e12
    assert total["kernels"] <= 200
    assert total["host_waits"] == 0
    assert moved["TensorParallelMuon"] <= 38
    assert moved["AdamW"] <= 34.1
