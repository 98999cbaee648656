"""Some steps with injected gradients: every way of Megatron-FSDP does what one process does."""

import functools
from dataclasses import replace

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import METHODS
from tests.unit.megatron_fsdp.runs import train, train_all, train_in_ddp
from tests.unit.storage import runs
from tests.unit.storage.runs import DENSE, INSTANCES, MOE, SHARED_EXPERTS, Result, Run, deviation

STEPS = 5
# per step an update rounds to about 1e-7 of its size: 3e-7 were the most that was seen
TOLERANCE = 1e-6

OPTIM, GRADS, NO_SHARD = (
    {"data_parallel_sharding_strategy": name} for name in ("optim", "optim_grads", "no_shard")
)
LAYOUTS = {
    "optim, dp 2": (2, Run(ddp=OPTIM)),
    "optim_grads, dp 2": (2, Run(ddp=GRADS)),
    "dp 2": (2, Run()),
    "tp 2 x dp 2": (4, Run(parallel={"tp": 2})),
    # replicas of shards, of whole parameters, and of what tensor parallelism cuts or replicates
    "hsdp 2 x 2": (4, Run(**INSTANCES)),
    "hsdp 2 x tp 2": (4, Run(parallel={"optimizer_instances": 2, "tp": 2}, ddp=INSTANCES["ddp"])),
    "no_shard, tp 2 x dp 2": (4, Run(parallel={"tp": 2}, ddp=NO_SHARD)),
    "moe, ep 2 x edp 2": (4, Run(model=MOE, parallel={"ep": 2})),
    "shared experts, tp 2": (2, Run(model=SHARED_EXPERTS, parallel={"tp": 2, "etp": 1})),
    "shared experts, expert tp 2": (2, Run(model=SHARED_EXPERTS, parallel={"etp": 2})),
    "bf16, dp 2": (2, Run(model={**DENSE, "dtype": torch.bfloat16}, config={"bf16": True})),
}


@functools.cache
def reference(kind: str) -> Result:
    """One process, whose parameters lie in the buffers of Megatron's DDP."""
    run = LAYOUTS[kind][1]
    return run_ranks(1, train_in_ddp, Run(model=run.model, config=run.config, steps=STEPS))[0]


ALONE = {"moe": "moe, ep 2 x edp 2", "shared experts": "shared experts, tp 2", "bf16": "bf16, dp 2"}
"""A layout for each other model or dtype, by the first word of its layouts."""

USUAL = ("no_shard, tp 2 x dp 2", "shared experts, expert tp 2", "bf16, dp 2")


@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, *USUAL))
def test_weights_norm_and_zeros_equal_one_process(layout):
    world, run = LAYOUTS[layout]
    kind = layout.split(",")[0]
    expected = reference(ALONE.get(kind, "dp 2"))
    results = run_ranks(world, train, replace(run, steps=STEPS))
    assert deviation(results, expected) < TOLERANCE
    runs.check_steps(results, expected, has_copies="tp" in run.parallel)


def test_main_weights_of_16_bits_are_rounded_after_each_step():
    """Half of the time by less than a bit of 256, so that some steps stay near."""
    run = replace(LAYOUTS["bf16, dp 2"][1], steps=STEPS)
    of_16_bits = replace(run, ddp={"megatron_fsdp_main_params_dtype": None})
    results = run_ranks(2, train, of_16_bits)
    assert 1e-4 < deviation(results, reference("bf16, dp 2")) < 2e-2


def test_matrices_are_cut_inside_and_some_ranks_hold_nothing_of_one():
    held = [result.extra for result in run_ranks(4, train, Run(steps=0))]
    parts = {name: [of_rank[name] for of_rank in held] for name in held[0] if "linear" in name}
    weights = [shares for name, shares in parts.items() if name.endswith("weight")]
    assert any(max(shares) < 1 for shares in weights)
    assert any(0 in shares for shares in weights)
    assert all(sum(shares) == pytest.approx(1) for shares in parts.values())


NAMES = (
    *("soap", "lion", "adam", "scion", "laprop", "mop", "muon_hyperball", "oblique_adam"),
    *("oblique_sgd", "polargrad", "rekls", "sgd", "spel", *METHODS),
)


@pytest.mark.long
@pytest.mark.parametrize("part", [0, 1])
def test_every_optimizer_equals_one_process(part):
    each = {name: Run(config={"optimizer": name}, steps=4) for name in NAMES[part::2]}
    expected = run_ranks(1, train_all, train_in_ddp, each, timeout=280)[0]
    results = run_ranks(2, train_all, train, each, timeout=280)
    far = {name: deviation([result[name] for result in results], expected[name]) for name in each}
    assert {name: value for name, value in far.items() if not value < TOLERANCE} == {}
