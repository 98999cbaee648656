"""Gradient clipping: what is scaled, and what is left alone on request."""

from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR, SEPARATE_GRAD_NORM_GROUPS

from megatron_eopt.megatron_core.stored_weights import named_gradients
from megatron_eopt.wrappers.config import EmergingOptimizerConfig
from megatron_eopt.wrappers.gradients import fuses_grad_scale
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.unit.storage.full_state import Case, build, steps
from tests.unit.storage.runs import (
    DENSE,
    MOE,
    PLAIN,
    SHARDED,
    Run,
    inject,
    make_chunk,
    make_optimizer,
)

STORAGES = {"sharded": SHARDED, "replicated": PLAIN}


def gradients(exempt: bool, by_hand: bool = False) -> dict[str, Any]:
    """Clip; return the norms of the main gradients of matrices and of all others."""
    run = Run(ddp=SHARDED)
    chunk = make_chunk(run)
    fields = {"clip_grad": 1.0, "muon_skip_grad_clip": exempt}
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, **fields)
    optimizer = make_optimizer(run, chunk, config=config)
    inject(run, chunk, 0)
    # as on a GPU, whose kernels scale gradients while they read them
    optimizer.has_kernels = True
    composite = optimizer.chained_optimizers[0].optimizer
    factors: list[Any] = []
    if by_hand:
        optimizer.prepare_grads()
        norm = optimizer.clip_grad_norm(1.0)
    else:
        # what update rules multiply gradients with while they read them, as long as the step lasts
        stepped = optimizer.step_with_ready_grads

        def step() -> bool:
            factors.extend(update_rule.grad_scale for update_rule in composite.update_rules)
            return stepped()

        optimizer.step_with_ready_grads = step
        _, norm, _ = optimizer.step()
        assert {update_rule.grad_scale for update_rule in composite.update_rules} == {None}
    squares = [
        sum(float(p.grad.square().sum()) for p in update_rule.params)
        * (1.0 if factor is None else float(factor) ** 2)
        for update_rule, factor in zip_longest(composite.update_rules, factors)
    ]
    return {"norm": float(norm), "muon": squares[0], "adam": squares[1]}


def test_exempt_matrices_are_not_scaled_and_still_count():
    clipped, exempt = run_ranks(2, gradients, False), run_ranks(2, gradients, True)
    factor = 1.0 / exempt[0]["norm"]
    assert exempt[0]["norm"] == clipped[0]["norm"] > 10
    for a, b in zip(clipped, exempt, strict=True):
        assert b["adam"] == pytest.approx(a["adam"], rel=1e-6)
        assert a["muon"] == pytest.approx(b["muon"] * factor**2, rel=1e-5)
    assert sum(result["muon"] + result["adam"] for result in clipped) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("exempt", [False, True])
def test_clip_grad_norm_clips_as_a_step_does(exempt):
    found = (run_ranks(2, gradients, exempt, by_hand) for by_hand in (True, False))
    for by_hand, step in zip(*found, strict=True):
        assert by_hand == pytest.approx(step, rel=1e-6)


def squares_by_norm(storage: str) -> dict[bool, float]:
    """Clip a model of which some weights have a norm of their own; return both sums of squares."""
    (name,) = SEPARATE_GRAD_NORM_GROUPS

    def mark(chunk: Any) -> None:
        for long_name, param in chunk.named_parameters():
            if "linear_fc1.weight" in long_name or "layernorm" in long_name:
                setattr(param, GRAD_NORM_GROUP_ATTR, name)

    case = Case(ddp=STORAGES[storage], config=STORAGES[storage] | {"clip_grad": 1.0})
    chunk, optimizer = build(case, mark)
    optimizer.has_kernels = storage == "sharded"  # as on a GPU
    steps(case, chunk, optimizer, 0, 1)
    squares = {True: 0.0, False: 0.0}
    for child in optimizer.chained_optimizers:
        for param, grad in named_gradients(child):
            squares[hasattr(param, GRAD_NORM_GROUP_ATTR)] += float(grad.square().sum())
    return squares


@pytest.mark.parametrize("storage", STORAGES)
def test_what_has_a_norm_of_its_own_is_clipped_by_it(storage):
    ranks = run_ranks(2, squares_by_norm, storage)
    parts = ranks if storage == "sharded" else ranks[:1]
    for own in (True, False):
        assert sum(squares[own] for squares in parts) == pytest.approx(1, rel=1e-5)


def norm_of(storage: str, parallel: dict[str, int]) -> float:
    """Return the gradient norm of a model with experts."""
    config = STORAGES[storage] | {"clip_grad": 1.0}
    case = Case("muon", MOE, parallel, STORAGES[storage], config)
    ((_, norm, _),) = steps(case, *build(case), 0, 1)
    return float(norm)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("parallel", [{"ep": 2}, {"tp": 2, "etp": 1, "ep": 2}], ids=str)
def test_the_norm_counts_every_expert_once(storage, parallel):
    (expected,) = run_ranks(1, norm_of, "replicated", {})
    assert run_ranks(2, norm_of, storage, parallel) == pytest.approx([expected] * 2, rel=1e-5)


@on_ranks(1)
def test_a_weight_that_stages_share_counts_on_one_of_them():
    storage = build(Case("muon", DENSE))[1].chained_optimizers[0]
    shard = storage.shards[0]
    assert storage.share_of(shard) == 1.0
    shard.param.shared = True  # as megatron-core marks it on the last stage
    assert storage.share_of(shard) == 0.0


def test_a_rule_without_shards_does_not_keep_others_from_scaling():
    rules = [SimpleNamespace(fuses_grad_scale=n == 1, shards=[0] * n) for n in (1, 0)]
    assert fuses_grad_scale(SimpleNamespace(update_rules=rules))
    rules[1].shards = [0]
    assert not fuses_grad_scale(SimpleNamespace(update_rules=rules))
