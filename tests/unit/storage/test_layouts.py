"""Layout invariance: with injected gradients every layout does what one stock process does."""

import functools
from dataclasses import replace

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_eopt.extending import LayerWiseDistributedOptimizer
from tests.harness import run_ranks
from tests.unit.storage import runs
from tests.unit.storage.runs import DENSE, MOE, Result, Run, deviation, train

INSTANCES = {
    "parallel": {"optimizer_instances": 2},
    "ddp": {"num_distributed_optimizer_instances": 2},
}

# One process of megatron-core's plain Muon is the reference. Per step an update rounds to about
# 1e-7 of its size, and Newton-Schulz in float32 amplifies differences of the clipped gradients
# (they come from the order in which the norm is summed) by less than ten.
TOLERANCE = 2e-6

STEPS = 10

LAYOUTS = {
    "dp 2": (2, Run()),
    "dp 4": (4, Run()),
    "padded buckets": (2, Run(ddp={"pad_buckets_for_high_nccl_busbw": True})),
    "tp 2 x dp 2": (4, Run(parallel={"tp": 2})),
    "two instances": (4, Run(**INSTANCES)),
    "ddp that all-reduces": (2, Run(ddp={"use_distributed_optimizer": False})),
    "fewer matrices than ranks": (4, Run(muon="layers.0.self_attention.linear_proj")),
    "moe, ep 2": (2, Run(model=MOE, parallel={"ep": 2})),
    "moe, ep 2 x edp 2": (4, Run(model=MOE, parallel={"ep": 2})),
    "moe, tp 2 x ep 2, expert tp 2": (4, Run(model=MOE, parallel={"tp": 2, "ep": 2, "etp": 2})),
    "moe, dp 1 and expert dp 2": (4, Run(model=MOE, parallel={"tp": 4, "ep": 2, "etp": 1})),
    "moe, ep 2, two instances": (
        4,
        Run(model=MOE, parallel={"ep": 2, "optimizer_instances": 2}, ddp=INSTANCES["ddp"]),
    ),
}


@functools.cache
def reference(is_moe: bool) -> Result:
    return run_ranks(1, train, Run(optimizer="stock", model=MOE if is_moe else DENSE, steps=STEPS))[
        0
    ]


@functools.cache
def one_process(muon: str) -> Result:
    return run_ranks(1, train, Run(muon=muon, steps=STEPS))[0]


LARGE = "moe, expert tp 2 x ep 2 x edp 2"


@pytest.mark.parametrize("layout", [*LAYOUTS, pytest.param(LARGE, marks=pytest.mark.long)])
def test_weights_norm_and_zeros_equal_one_stock_process(layout):
    large = 8, Run(model=MOE, parallel={"tp": 2, "ep": 2, "etp": 2})
    world, run = large if layout == LARGE else LAYOUTS[layout]
    run = replace(run, steps=STEPS)
    # stock has no way to give Muon some matrices only
    expected = one_process(run.muon) if run.muon else reference("experts" in run.model)
    results = run_ranks(world, train, run)
    assert deviation(results, expected) < TOLERANCE
    for result in results:
        for (done, norm, zeros), (_, expected_norm, expected_zeros) in zip(
            result.steps, expected.steps, strict=True
        ):
            assert done
            # sums of squares in another order
            assert norm == pytest.approx(expected_norm, rel=1e-6)
            assert zeros == expected_zeros > 1000


def test_the_reference_moves_every_weight():
    start = run_ranks(1, train, Run(optimizer="stock", steps=0))[0]
    for name, (_, weight) in reference(False).weights.items():
        assert (weight - start.weights[name][1]).norm() > 0.01 * weight.norm(), name


def test_two_runs_are_bit_equal():
    run = Run(parallel={"tp": 2})
    first, second = run_ranks(4, train, run), run_ranks(4, train, run)
    for a, b in zip(first, second, strict=True):
        for name, (_, weight) in a.weights.items():
            assert torch.equal(weight, b.weights[name][1]), name


def with_collection(run: Run) -> Result:
    """Pass a collection of the groups that Megatron's own optimizers ask for, and no others."""
    chunk = runs.make_chunk(run)
    known = ("tp", "dp", "dp_cp", "expt_dp", "expt_tp", "mp", "tp_ep_pp", "intra_dist_opt")
    collection = ProcessGroupCollection.use_mpu_process_groups(list(known))
    config = runs.make_config(run)
    matrices, others = runs.param_groups(run, config, chunk)
    for name, param in chunk.named_parameters():
        param.test_is_qkv = name.endswith("linear_qkv.weight")
    bases = [runs.muon_over(matrices, config, chunk), runs.adam_over(others, config)]
    optimizer = LayerWiseDistributedOptimizer(bases, config, collection, None, [chunk])
    runs.set_lr(optimizer, config)
    for step in range(run.steps):
        runs.inject(run, chunk, step)
        optimizer.step()
    return Result(runs.weights(run, chunk), [])


def test_a_callers_collection_serves_as_megatrons_own_groups():
    run = Run(model=MOE | {"bias": False}, parallel={"tp": 2, "ep": 2, "etp": 1})
    own = run_ranks(4, train, run)
    for a, b in zip(own, run_ranks(4, with_collection, run), strict=True):
        for name, (_, weight) in b.weights.items():
            assert torch.equal(weight, a.weights[name][1]), name


def test_blockwise_orthogonalizes_each_slab():
    """As stock does with this mode: another update, but the same one."""
    run = Run(parallel={"tp": 2}, config={"muon_tp_mode": "blockwise"}, steps=STEPS)
    stock = run_ranks(2, train, replace(run, optimizer="stock"))
    ours = run_ranks(4, train, run)
    by_slab = {
        result.weights["embedding.word_embeddings.weight"][0].part: result for result in stock
    }
    for result in ours:
        part = result.weights["embedding.word_embeddings.weight"][0].part
        for name, (_, weight) in result.weights.items():
            expected = by_slab[part].weights[name][1]
            assert (weight - expected).norm() < TOLERANCE * expected.norm(), name
    assert deviation(ours, reference(False)) > 0.01
