"""A search finds what planning all layouts would find."""

import functools
import itertools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.tools.plan import search as searching
from megatron_eopt.tools.plan.machine import MACHINES
from megatron_eopt.tools.plan.model import ParallelLayout, least_bytes
from megatron_eopt.tools.plan.planning import Plan, plan
from megatron_eopt.tools.plan.search import layouts_of, search
from megatron_eopt.tools.recipe import NAMES, recipe
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long
from tests.unit.plan.test_model import DENSE, LATENT, MIXED, changed
from tests.unit.plan.test_planning import SHARDED

BATCH: dict[str, Any] = {"tokens": 64 * DENSE.seq_length, "micro_batch": 1}

MODELS = {
    # three layers: stages are uneven
    "dense": DENSE,
    "few groups": changed(DENSE, num_layers=4, num_query_groups=1),
    "experts": MIXED,
    "latent": changed(MIXED, **LATENT, qk_layernorm=True),
}
EVERY = itertools.product(MODELS, (1.5, 0.6))


@pytest.mark.parametrize(
    ("name", "share"), mostly_long(EVERY, ("dense", 1.5), ("dense", 0.6), ("experts", 0.6))
)
@on_ranks(1, cpu=False, timeout=300)
def test_a_search_finds_the_shortest_of_all_that_fit(name, share):
    """Compare what a search finds with what all layouts of 4 GPUs need and take."""
    architecture = MODELS[name]
    dist.destroy_process_group()
    config = EmergingOptimizerConfig(optimizer="muon", **SHARDED)
    layouts = layouts_of(architecture, MACHINES["H100"], 4, 64)
    whole = plan(architecture, ParallelLayout(data=4), MACHINES["H100"], config, **BATCH)
    machine = replace(
        MACHINES["H100"], capacity=share * (whole.fullest[1].total + whole.passes.recomputed)
    )
    planned: list[ParallelLayout] = []

    @functools.cache
    def plan_of(layout: ParallelLayout) -> Plan:
        return plan(architecture, layout, machine, config, **BATCH)

    def noted(layout: ParallelLayout) -> Plan:
        planned.append(layout)
        return plan_of(layout)

    with patch.object(searching, "SHOWN", 3):
        found = search(layouts, architecture, machine, noted, progress=lambda it: it, **BATCH)
    all_plans = []
    for layout in layouts:
        try:
            all_plans.append(plan_of(layout))
        except ConfigurationError:
            assert layout in planned or found.longer
    for one in all_plans:
        assert least_bytes(architecture, one.layout) < one.fullest[1].total
    seconds = sorted(p.iteration for p in all_plans if p.spare > 0)
    assert [p.iteration for p in found.plans] == seconds[:3]
    counts = (len(found.plans), found.unfit, found.longer, len(found.errors))
    assert sum(counts) == len(layouts)
    near = [p for p in found.plans if p.iteration <= 1.01 * seconds[0]]
    assert found.best is not None
    assert found.best.spare == max(p.spare for p in near)
    assert found.best.iteration <= 1.01 * seconds[0]


@pytest.mark.parametrize("name", NAMES)
def test_layouts_of_published_models(name):
    model, experts = recipe(name).architecture(), 1
    found = layouts_of(model, MACHINES["H100"], 512, 1024)
    assert len(found) == len(set(found))
    for layout in found:
        assert layout.world_size == 512
        assert 1024 % layout.data == 0
        assert layout.tensor * layout.data % (layout.expert * layout.expert_tensor) == 0
        assert layout.expert_tensor in (1, layout.tensor)
        experts = max(experts, layout.expert)
    assert {layout.tensor for layout in found} == {1, 2, 4, 8}
    # layers need not divide evenly: 61 layers of DeepSeek-V3 on 2 stages
    assert {1, 2, 4} <= {layout.pipeline for layout in found}
    assert (experts > 1) == model.moe_layers[-1]
