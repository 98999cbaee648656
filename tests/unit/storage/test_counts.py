"""What the storage costs: buffer elements, bytes of state, collectives."""

from typing import Any
from unittest import mock

import pytest
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from tests.harness import run_ranks
from tests.harness.collectives import counted
from tests.unit.storage.runs import BF16, MOE, Run, inject, make_chunk, make_optimizer


def elements(update_rule: Any) -> int:
    """Return how many numbers all ranks' matrices have together."""
    shapes = [matrix.shape for shard in update_rule.shards for matrix in shard.split.matrices]
    return sum(rows * cols for rows, cols in shapes)


def count(run: Run) -> dict[str, Any]:
    chunk = make_chunk(run)
    child = make_optimizer(run, chunk).chained_optimizers[0]
    muon, _ = child.optimizer.update_rules
    stock = DistributedOptimizer.compute_full_param_layout(
        [param for param in chunk.parameters() if param.requires_grad],
        chunk.bucket_size,
        parallel_state.get_data_parallel_world_size(),
        chunk.ddp_config,
    )
    state = [value for p in muon.params for value in child.optimizer.state[p].values()]
    return {
        "buffer": [sum(bucket.grad_data.numel() for bucket in b.buckets) for b in child.buffers],
        "stock": [layout.bucket_indices[-1][1] for layout in stock.layouts.values()],
        "bytes": sum(tensor.nbytes for tensor in [*muon.params, *state]),
        "matrices": elements(muon),
    }


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_buffers_are_stocks_and_muon_costs_eight_bytes_an_element(world, distributed):
    run = Run(ddp={"use_distributed_optimizer": distributed}, **BF16)
    counts = run_ranks(world, count, run)
    for result in counts:
        assert result["buffer"] == result["stock"]
        # momentum and main weight, nothing else; no element is stored twice
    assert sum(result["bytes"] for result in counts) == 8 * counts[0]["matrices"]


def count_calls(run: Run) -> dict[str, int]:
    chunk = make_chunk(run)
    optimizer = make_optimizer(run, chunk)
    inject(run, chunk, 0)
    original = param_and_grad_buffer.dist_all_gather_func
    patch = mock.patch.object(param_and_grad_buffer, "dist_all_gather_func", wraps=original)
    with counted() as calls, patch as gathers:
        optimizer.step()
    muons = [child.optimizer.update_rules[0] for child in optimizer.chained_optimizers]
    plans = [item.plan for muon in muons for item in muon.schedules]
    return {
        "waves": sum(len(plan.waves) for plan in plans),
        "planned": sum(plan.calls for plan in plans),
        "all-to-alls": sum(name == "all_to_all_single" for name, *_ in calls),
        "all-gathers": gathers.call_count,
        "bucket groups": len(chunk.bucket_groups + chunk.expert_parallel_bucket_groups),
        "bytes": max(sum(plan.bytes_sent for plan in plans), sum(p.bytes_received for p in plans)),
        "matrices": sum(map(elements, muons)),
    }


def test_two_all_to_alls_a_wave_at_most_and_one_all_gather_a_bucket():
    buckets = {"overlap_grad_reduce": True, "bucket_size": 3000}
    for calls in run_ranks(4, count_calls, Run(model=MOE, ddp=buckets, parallel={"ep": 2})):
        assert calls["all-to-alls"] == calls["planned"] <= 2 * calls["waves"]
        assert calls["all-gathers"] == calls["bucket groups"] > 3


def test_a_rank_sends_and_receives_its_share_twice():
    world = 4
    results = run_ranks(world, count_calls, Run())
    for result in results:
        assert result["all-to-alls"] == 2 * result["waves"]
    # in float32; the owners' shares differ by at most the largest matrix of this tiny model
    average = sum(result["bytes"] for result in results) / world
    assert average <= 8 * results[0]["matrices"] / world
