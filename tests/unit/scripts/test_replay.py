"""A rank of a large job that is run here does what its dry run counted, exactly."""

from collections import Counter
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.gpu_check.replay import figures, replay, scaled
from benchmarks.gpu_check.sections.replay import Job
from benchmarks.gpu_check.sections.replay import replayed as replayed_job
from benchmarks.gpu_check.stock import Share, settings_of, share_of, stock_muon
from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.tools.dry_run import dry_world
from megatron_eopt.tools.plan.architectures import Architecture
from megatron_eopt.tools.plan.machine import MACHINES
from megatron_eopt.tools.plan.model import ParallelLayout
from megatron_eopt.tools.plan.planning import plan
from megatron_eopt.tools.recipe import NAMES, recipe
from tests.harness import RankError, run_ranks
from tests.harness.each_rank import on_ranks
from tests.unit.plan.test_model import DENSE, MIXED

SCALE = Fraction(1, 64)


def shrunk(name: str, changes: Any, **optimizer: Any) -> tuple[Architecture, Any]:
    """Return a recipe's model, with changes and smaller, and the configuration of its optimizer."""
    one = recipe(name)
    settings = one.optimizer_settings | {"use_distributed_optimizer": True} | optimizer
    config = EmergingOptimizerConfig(lr=1e-3, bf16=True, **settings)
    return scaled(one.architecture(**changes), SCALE), config


def check(name: str, layout: ParallelLayout | None, rank: int, changes: Any, optimizer: Any) -> Any:
    """Replay a rank's step, which must be as counted; return it."""
    dist.destroy_process_group()
    model, config = shrunk(name, changes, **optimizer)
    done = replay(model, layout or recipe(name).planned(), config, rank)
    assert done.agrees, f"{figures(done.report)}\n{figures(done.expected)}"
    dry = asdict(done.expected.memory)
    for kind, size in asdict(done.report.memory).items():
        assert size == pytest.approx(dry[kind], rel=0.02), kind
    assert done.step > 0
    assert config.optimizer == "adam" or done.parts["products"] > 0
    return done


MOE = {"num_layers": 2, "num_experts": 8, "moe_layer_freq": [0, 1]}
CASES = {
    "dense": ("llama-3-8b", ParallelLayout(tensor=2, data=4), 3, {"num_layers": 2}, {}),
    "experts": ("kimi-k2", ParallelLayout(pipeline=2, data=4, expert=4), 5, MOE, {}),
    "adam": ("llama-3-8b", ParallelLayout(data=4), 1, {"num_layers": 1}, {"optimizer": "adam"}),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(1, cpu=False, timeout=300)
def test_a_replayed_step_is_the_one_that_was_counted(name):
    done = check(*CASES[name])
    for part in ("phases", "collectives", "host_reads", "elements"):
        wrong: Any = Counter(getattr(done.expected, part))
        if part == "phases":
            phase, amount = next(iter(done.expected.phases.items()))
            wrong = {**done.expected.phases, phase: replace(amount, bytes=amount.bytes + 1)}
        else:
            wrong["something"] += 1
        broken = replace(done, expected=replace(done.expected, **{part: wrong}))
        assert not broken.agrees, f"a wrong count of {part} is not noticed"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@on_ranks(1, cpu=False, timeout=900)
def test_every_recipe_can_be_replayed(name):
    check(name, None, 0, {}, {})


@pytest.mark.parametrize("name", ["dense", "experts"])
@on_ranks(1, cpu=False, timeout=300)
def test_plans_know_the_memory_that_a_rank_keeps(name):
    recipe_name, layout, _, changes, _ = CASES[name]
    dist.destroy_process_group()
    model, config = shrunk(recipe_name, changes)
    planned = plan(model, layout, MACHINES["H100"], config, tokens=2**22)
    done = replay(model, layout, config, planned.rank)
    kept, real = asdict(planned.report.memory), asdict(done.report.memory)
    del kept["transient"]
    assert kept == pytest.approx({kind: real[kind] for kind in kept}, rel=0.02)
    # all tensors that are alive, also those that no optimizer names
    assert sum(kept.values()) == pytest.approx(done.peak - real["transient"], rel=0.02)


@on_ranks(1, cpu=False, timeout=300)
def test_the_same_rank_runs_with_adam_and_with_megatrons_muon():
    dist.destroy_process_group()
    # so small that even megatron-core's Muon takes no seconds for a step
    found = replayed_job(Job(ParallelLayout(data=4), SCALE / 16, layers=1))
    assert found["counts_agree"] is True
    assert 0 < found["planned_share"] < found["share_of_iteration"]
    runs = (found, found["adam"], found["stock"])
    assert [run["seconds"].get("products", 0) > 0 for run in runs] == [True, False, True]
    for run in runs:
        assert run["seconds"]["step"] > 0
        assert 0 < run["share_of_iteration"] < 1
        assert 0 < run["elements"] <= run["peak"]
    assert found["elements"] == found["adam"]["elements"]
    assert found["stock"]["share"]["matrices"] <= found["stock"]["share"]["of"]


def shares(architecture: Architecture, layout: ParallelLayout) -> list[Share]:
    dist.destroy_process_group()
    config, _ = settings_of(EmergingOptimizerConfig(optimizer="muon", lr=1e-3, bf16=True))
    found = []
    for rank in range(layout.world_size):
        with dry_world(rank, layout.world_size):
            model, optimizer = stock_muon(architecture, layout, config)
            found.append(share_of(optimizer, model, layout))
    return found


def test_megatron_gives_each_matrix_to_one_data_parallel_rank():
    found = run_ranks(1, shares, DENSE, ParallelLayout(data=4), cpu=False)[0]
    assert sum(share.matrices for share in found) == found[0].of == 12
    assert min(share.busiest for share in found) == 1
    # two experts-parallel groups have experts of their own
    found = run_ranks(1, shares, MIXED, ParallelLayout(data=4, expert=2), cpu=False)[0]
    experts = 3 * 2 * 2
    assert sum(share.matrices for share in found) == found[0].of + experts


def test_what_megatron_cannot_do_is_one_sentence():
    with pytest.raises(ConfigurationError, match="only muon and adaptive_muon"):
        settings_of(EmergingOptimizerConfig(optimizer="soap", lr=1e-3))
    with pytest.raises(RankError, match="num_distributed_optimizer_instances"):
        run_ranks(1, shares, DENSE, ParallelLayout(data=4, instances=2), cpu=False)
    unknown = {"muon_split_per_head": True, "muon_scale_mode": "adamw_rms"}
    _, notes = settings_of(EmergingOptimizerConfig(optimizer="muon", lr=1.0, **unknown))
    assert "adamw_rms" in notes[0]
    assert "per head" in notes[1]


def test_scales_that_do_not_fit_are_refused():
    model = recipe("llama-3-8b").architecture()
    for scale, words in {"1/50": "square", "1/1000000": "hidden_size"}.items():
        with pytest.raises(ConfigurationError, match=words):
            scaled(model, Fraction(scale))
    assert scaled(model, SCALE).fields["hidden_size"] == 512
