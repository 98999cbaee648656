"""Training in many layouts strays from one process hardly more than stock's optimizers do.

Rounding differs between layouts, and training amplifies it, so the measure is what stock's
optimizers do on the same models, data and layouts in the same run.
"""

from dataclasses import replace
from typing import Any

import pytest
from megatron.core import parallel_state

from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import forward_backward, synthetic_batch, tiny_gpt, wrap_ddp
from tests.unit.stores.runs import (
    DENSE,
    MOE,
    Result,
    Run,
    deviation,
    global_name,
    global_values,
    make_config,
    make_optimizer,
    set_lr,
    slab_of,
)

pytestmark = pytest.mark.long

STEPS = 10
AT_MOST = 3

# no biases: the gradient of a key's bias is zero but for rounding, which Adam blows up
DENSE_MODEL = DENSE | {"bias": False}
MOE_MODEL = MOE | {"query_groups": 2, "gated": True}

LAYOUTS: dict[str, dict[str, tuple[int, dict[str, int]]]] = {
    "dense": {
        "dp 2": (2, {}),
        "dp 4": (4, {}),
        "tp 2": (2, {"tp": 2}),
        "tp 2 x dp 2": (4, {"tp": 2}),
        "pp 2": (2, {"pp": 2}),
        "pp 2 x dp 2": (4, {"pp": 2}),
        "pp 2 x tp 2": (4, {"pp": 2, "tp": 2}),
    },
    "moe": {
        "dp 2": (2, {}),
        "ep 2": (2, {"ep": 2}),
        "ep 2 x edp 2": (4, {"ep": 2}),
        "pp 2": (2, {"pp": 2}),
        "pp 2 x ep 2": (4, {"pp": 2, "ep": 2}),
        "tp 2": (2, {"tp": 2, "etp": 1}),
        "tp 2, expert tp 2": (2, {"tp": 2}),
        "tp 2 x ep 2": (4, {"tp": 2, "ep": 2, "etp": 1}),
        "tp 2 x ep 2, expert tp 2": (4, {"tp": 2, "ep": 2}),
    },
}
MODELS = {"dense": DENSE_MODEL, "moe": MOE_MODEL}


def train_for_real(run: Run) -> Result:
    """Train on the same global batches in any layout."""
    initialize_megatron(**run.parallel)
    gated = run.model.get("gated", False)
    model = tiny_gpt(**run.model)
    for name, param in model.named_parameters():
        slab = slab_of(name, param, gated)
        whole = global_values(global_name(name, run.model), slab, param.shape, 0)
        param.data.copy_(slab.of(whole))
    chunk = wrap_ddp(model, **run.ddp)
    optimizer = make_optimizer(run, chunk)
    set_lr(optimizer, make_config(run))
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    steps = []
    for step in range(run.steps):
        optimizer.zero_grad()
        forward_backward([chunk], [synthetic_batch(4 * step + i) for i in range(rank, 4, size)])
        steps.append(optimizer.step())
    weights = {
        global_name(name, run.model): (slab_of(name, param, gated), param.detach().clone())
        for name, param in chunk.named_parameters()
    }
    return Result(weights, steps)


def deviations(model: str, run: Run) -> dict[str, float]:
    """Return the largest relative deviation of a weight from one process in every layout."""
    run = replace(run, model=MODELS[model], steps=STEPS)
    (alone,) = run_ranks(1, train_for_real, run, timeout=120)
    found = {}
    for name, (world, layout) in LAYOUTS[model].items():
        results = run_ranks(world, train_for_real, replace(run, parallel=layout), timeout=120)
        for result in results:
            assert all(done for done, _, _ in result.steps)
        assert set().union(*(result.weights for result in results)) == alone.weights.keys()
        found[name] = deviation(results, alone)
    return found


OURS = Run(ddp={"use_distributed_optimizer": True})
ADAM = Run(
    optimizer="stock",
    ddp={"use_distributed_optimizer": True},
    config={"optimizer": "adam", "use_distributed_optimizer": True},
)
PLAIN_MUON = Run(optimizer="stock", ddp={"use_distributed_optimizer": False})


def compare(model: str, record_property: Any) -> tuple[float, float, float]:
    """Record every layout; return the largest deviations of ours, Adam and stock's plain Muon."""
    ours, adam, muon = (deviations(model, run) for run in (OURS, ADAM, PLAIN_MUON))
    of_layouts = [f"{name}: {ours[name]:.1e}, {adam[name]:.1e}, {muon[name]:.1e}" for name in ours]
    record_property("ours, Adam, plain Muon", "; ".join(of_layouts))
    worst, adams, muons = (max(found.values()) for found in (ours, adam, muon))
    record_property("largest, x Adam's largest", f"{worst / adams:.2f}")
    record_property("x plain Muon's", f"{worst / muons:.2f}")
    assert worst > 0
    return worst, adams, muons


def test_dense_training_strays_at_most_three_times_as_far_as_adam(record_property):
    worst, adam, _ = compare("dense", record_property)
    assert worst <= AT_MOST * adam


def test_moe_training_strays_at_most_three_times_as_far_as_plain_muon(record_property):
    """Adam is no measure here, nor is it kept to.

    Most of these layouts differ in the order of a few sums only. Adam hands such
    rounding on as it is; Newton-Schulz amplifies it, in megatron-core's plain Muon as well.
    """
    worst, _, muon = compare("moe", record_property)
    assert worst <= AT_MOST * muon
