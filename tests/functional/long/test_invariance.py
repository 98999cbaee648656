"""Injected gradients: any layout, with and without overlap, does what one stock process does."""

import functools
from dataclasses import replace

import pytest
import torch

from tests.harness import run_ranks
from tests.unit.stores.runs import (
    DENSE,
    MOE,
    Result,
    Run,
    deviation,
    train,
)

pytestmark = pytest.mark.long

STEPS = 10

# An update rounds to about 1e-7 of its size, and Newton-Schulz in float32 amplifies differences of
# the clipped gradients (they come from the order in which the norm is summed) by less than ten.
TOLERANCE = 2e-6

# grouped-query attention and a gated MLP in both
MODELS = {"dense": DENSE, "moe": MOE | {"query_groups": 2, "gated": True}}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 3000}

# (data, tensor, expert) parallel sizes that four ranks allow
LAYOUTS = {
    "dense": [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1)],
    "moe": [
        *[(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1)],
        *[(2, 1, 2), (4, 1, 2), (1, 2, 2), (2, 2, 2)],
    ],
}
CASES = [(model, *sizes) for model, layouts in LAYOUTS.items() for sizes in layouts]


def step_by_step(run: Run) -> Result:
    """Step on injected gradients; parameters are gathered at the end."""
    return train(run, gathered=True)


@functools.cache
def reference(model: str) -> Result:
    """Return one process of megatron-core's plain Muon."""
    run = Run(optimizer="stock", model=MODELS[model], steps=STEPS)
    return run_ranks(1, step_by_step, run, timeout=200)[0]


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize(
    ("model", "dp", "tp", "ep"),
    CASES,
    ids=[f"{model}-dp{dp}-tp{tp}-ep{ep}" for model, dp, tp, ep in CASES],
)
def test_ten_steps_equal_one_stock_process(model, dp, tp, ep, overlap, record_property):
    parallel = {"tp": tp, "ep": ep, "etp": 1 if ep > 1 else tp}
    run = Run(model=MODELS[model], parallel=parallel, steps=STEPS)
    if overlap:
        # megatron-core checks that both agree
        run = replace(run, ddp=OVERLAP, config={"overlap_param_gather": True})
    expected = reference(model)
    results = run_ranks(dp * tp, step_by_step, run, timeout=200)
    worst = deviation(results, expected)
    record_property("largest relative deviation", f"{worst:.1e}")
    assert worst < TOLERANCE
    for result in results:
        for (done, norm, zeros), (_, expected_norm, expected_zeros) in zip(
            result.steps, expected.steps, strict=True
        ):
            assert done
            # sums of squares in another order
            assert norm == pytest.approx(expected_norm, rel=1e-6)
            assert zeros == expected_zeros > 1000


@pytest.mark.parametrize("model", MODELS)
def test_two_runs_are_bit_equal(model):
    parallel = {"tp": 2} if model == "dense" else {"tp": 2, "ep": 2, "etp": 1}
    run = Run(model=MODELS[model], parallel=parallel, steps=STEPS)
    first, second = (run_ranks(4, step_by_step, run, timeout=200) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.steps == b.steps
        for name, (_, weight) in a.weights.items():
            assert torch.equal(weight, b.weights[name][1]), name
