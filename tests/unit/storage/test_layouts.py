"""Layout invariance: with injected gradients every layout does what one stock process does."""

import functools
from dataclasses import replace

import pytest
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import assert_same, copies_of
from tests.harness.tiers import mostly_long
from tests.unit.storage import runs
from tests.unit.storage.runs import DENSE, INSTANCES, MOE, SHARED_EXPERTS, Result, Run, train

# One process of megatron-core's plain Muon is the reference. Per step an update rounds to about
# 1e-7 of its size, and Newton-Schulz in float32 amplifies differences of the clipped gradients
# (they come from the order in which the norm is summed) by less than ten.
TOLERANCE = 2e-6

STEPS = 10


LAYOUTS = {  # `functional/random_layouts` has many more
    "padded buckets": (2, Run(ddp={"pad_buckets_for_high_nccl_busbw": True})),
    "tp 2 x dp 2": (4, Run(parallel={"tp": 2})),
    "two instances": (4, Run(**INSTANCES)),
    "ddp that all-reduces": (2, Run(ddp={"use_distributed_optimizer": False})),
    "fewer matrices than ranks": (4, Run(muon="layers.0.self_attention.linear_proj")),
    "moe, dp 1 and expert dp 2": (4, Run(model=MOE, parallel={"tp": 4, "ep": 2, "etp": 1})),
    # tensor parallelism of the experts only
    "shared experts, dp 4, expert tp 2": (4, Run(model=SHARED_EXPERTS, parallel={"etp": 2})),
    "moe, expert tp 2 x ep 2 x edp 2": (8, Run(model=MOE, parallel={"tp": 2, "ep": 2, "etp": 2})),
}


MODELS = {"dense": DENSE, "moe": MOE, "shared experts": SHARED_EXPERTS}


@functools.cache
def reference(model: str = "dense", muon: str = "") -> Result:
    # stock has no way to give Muon some matrices only
    optimizer = "layer_wise" if muon else "stock"
    run = Run(optimizer=optimizer, model=MODELS[model], muon=muon, steps=STEPS)
    return run_ranks(1, train, run)[0]


@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, *list(LAYOUTS)[:-1]))
def test_weights_norm_and_zeros_equal_one_stock_process(layout):
    world, run = LAYOUTS[layout]
    run = replace(run, steps=STEPS)
    model = next(name for name, sizes in MODELS.items() if sizes == run.model)
    expected = reference(model, run.muon)
    results = run_ranks(world, train, run)
    assert runs.deviation(results, expected) < TOLERANCE
    runs.check_steps(results, expected)


def test_the_reference_moves_every_weight():
    start = run_ranks(1, train, Run(optimizer="stock", steps=0))[0]
    for name, (_, weight) in reference().weights.items():
        assert (weight - start.weights[name][1]).norm() > 0.01 * weight.norm(), name


def with_collection(run: Run) -> Result:
    """Pass a collection of the groups that Megatron's own optimizers ask for, and no others."""
    initialize_megatron(**run.parallel)
    known = ("tp", "dp", "dp_cp", "expt_dp", "expt_tp", "mp", "tp_ep_pp", "intra_dist_opt")
    return train(run, collection=ProcessGroupCollection.use_mpu_process_groups(list(known)))


def test_a_callers_collection_serves_as_megatrons_own_groups():
    run = Run(model=MOE | {"bias": False}, parallel={"tp": 2, "ep": 2, "etp": 1})
    own = run_ranks(4, train, run)
    for a, b in zip(own, run_ranks(4, with_collection, run), strict=True):
        assert_same(b.tensors, a.tensors)


@on_ranks(2)
def test_what_is_frozen_behind_a_ddp_that_all_reduces_is_as_what_it_never_had():
    results = []
    for frozen in ("linear_fc1", None):
        run = Run(ddp={"use_distributed_optimizer": False}, frozen=frozen)
        chunk = runs.make_chunk(run)
        for name, param in chunk.named_parameters():
            param.requires_grad_("linear_fc1" not in name)
        optimizer = runs.make_optimizer(run, chunk)
        runs.inject(run, chunk, 0)
        optimizer.step()
        results.append(copies_of(chunk))
        forget_megatron()
    assert_same(*results)


@pytest.mark.parametrize(
    ("model", "parallel"), [("dense", {"tp": 2}), ("shared experts", {"etp": 2})]
)
def test_blockwise_orthogonalizes_each_slab(model, parallel):
    """As stock does with this mode: another update, but the same one."""
    blockwise = {"muon_tp_mode": "blockwise"}
    run = Run(model=MODELS[model], parallel=parallel, config=blockwise, steps=STEPS)
    stock = run_ranks(2, train, replace(run, optimizer="stock"))
    ours = run_ranks(4, train, run)
    for result in ours:
        for name, (slab, weight) in result.weights.items():
            its = (other.weights[name] for other in stock)
            expected = next(values for where, values in its if where.part == slab.part)
            assert (weight - expected).norm() < TOLERANCE * expected.norm(), name
    assert runs.deviation(ours, reference(model)) > 0.01
