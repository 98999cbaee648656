"""Groups that span tensor and data parallelism, found or created."""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed

from megatron_eopt.base.agreement import GroupPlace
from megatron_eopt.storage import LayerWiseDistributedOptimizer
from megatron_eopt.stores.buffers import buffer_sets
from megatron_eopt.stores.rank_grid import _classes
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.unit.stores import runs
from tests.unit.stores.runs import DENSE, MOE, Result, Run, inject, make_chunk, train


def test_ranks_that_share_a_group_belong_together():
    # 8 ranks, tensor parallel pairs (0 1)(2 3)(4 5)(6 7); data parallel (0 2)(1 3) and (4 6)(5 7)
    tensor = [GroupPlace(r - r % 2, r % 2) for r in range(8)]
    data = [GroupPlace(r % 2 + 4 * (r // 4), (r // 2) % 2) for r in range(8)]
    assert _classes(tensor, data) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    alone = [GroupPlace(r, 0) for r in range(3)]
    assert _classes(alone, alone) == [[0], [1], [2]]


def describe(parallel: dict[str, Any], model: dict[str, Any], ddp: dict[str, Any]) -> list[Any]:
    initialize_megatron(**parallel)
    chunk = make_chunk(Run(model=model, ddp=ddp))
    found = []
    for item in buffer_sets([chunk], None, use_gloo=False, redistributed=True):
        ranks, grid = item.grid.ranks, item.grid
        members = [distributed.get_rank()]
        if ranks.group is not None:
            members = distributed.get_process_group_ranks(ranks.group)
        assert members[ranks.rank] == distributed.get_rank()
        places = list(zip(members, grid.tensor_ranks, grid.data_ranks, strict=True))
        existing = ranks.group is parallel_state.get_tensor_and_data_parallel_group(
            with_context_parallel=True
        )
        found.append((sorted(places), existing))
    return found


def test_megatrons_own_group_serves_tensor_times_data_parallelism():
    for ((places, existing),) in run_ranks(4, describe, {"tp": 2}, DENSE, {}):
        assert existing
        assert places == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]


def test_groups_are_created_for_experts_and_for_instances():
    experts = run_ranks(4, describe, {"tp": 2, "ep": 2, "etp": 2}, MOE, {})
    pairs = [([(0, 0, 0), (1, 1, 0)], False), ([(2, 0, 0), (3, 1, 0)], False)]
    assert [result[1] for result in experts] == [pairs[0], pairs[0], pairs[1], pairs[1]]
    instances = run_ranks(
        4,
        describe,
        {"tp": 2, "optimizer_instances": 2},
        DENSE,
        {"num_distributed_optimizer_instances": 2},
    )
    alone = [[(0, 0, 0), (1, 1, 0)], [(2, 0, 0), (3, 1, 0)]]
    assert [result[0][0] for result in instances] == [alone[0], alone[0], alone[1], alone[1]]


def with_collection(run: Run) -> Result:
    """Pass a collection of the groups that Megatron's own optimizers ask for, and no others."""
    chunk = make_chunk(run)
    known = ("tp", "dp", "dp_cp", "expt_dp", "expt_tp", "mp", "tp_ep_pp", "intra_dist_opt")
    collection = ProcessGroupCollection.use_mpu_process_groups(list(known))
    config = runs.make_config(run)
    matrices, others = runs.param_groups(run, config, chunk)
    for name, param in chunk.named_parameters():
        param.test_is_qkv = name.endswith("linear_qkv.weight")
    bases = [runs.muon_over(matrices, config, chunk), runs.adam_over(others, config)]
    optimizer = LayerWiseDistributedOptimizer(bases, config, collection, None, [chunk])
    runs.set_lr(optimizer, config)
    steps = []
    for step in range(run.steps):
        inject(run, chunk, step)
        steps.append(optimizer.step())
    return Result(runs.weights(run, chunk), steps)


@pytest.mark.parametrize("parallel", [{"tp": 2, "ep": 2, "etp": 1}, {"tp": 2, "ep": 2, "etp": 2}])
def test_a_callers_collection_serves_as_megatrons_own_groups(parallel):
    run = Run(model=MOE | {"bias": False}, parallel=parallel)
    own = run_ranks(4, train, run)
    given = run_ranks(4, with_collection, run)
    for a, b in zip(own, given, strict=True):
        for name, (_, weight) in b.weights.items():
            assert torch.equal(weight, a.weights[name][1]), name
