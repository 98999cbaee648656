"""What trainers read from the optimizer, and write to it, besides stepping."""

from typing import Any

import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer

from tests.harness import run_ranks
from tests.unit.contracts.callers import (
    STORAGES,
    build,
    gradients,
    main_params,
    scheduler_of,
    state_tensors,
    train,
)


def _reads(storage: str) -> None:
    chunk, optimizer = build(STORAGES[storage], "bfloat16")
    assert isinstance(optimizer, ChainedOptimizer)
    assert not optimizer.is_stub_optimizer
    assert optimizer.get_loss_scale().item() == 1.0
    assert optimizer.scale_loss(torch.tensor([3.0])).item() == 3.0
    assert float(optimizer.count_zeros() or 0) >= 0
    scheduler = scheduler_of(optimizer)
    scheduler.step(2)
    for group in optimizer.param_groups:
        assert group["lr"] == 0.01
        assert group["is_decoupled_lr"] is False
    gradients(chunk, optimizer, 0)
    optimizer.step()
    assert all(state[key] is not None for state, key in state_tensors(optimizer))
    assert sum(p.numel() for p in main_params(optimizer)) > 0
    resumed = scheduler_of(build(STORAGES[storage], "bfloat16")[1])
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.optimizer.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("storage", STORAGES)
def test_reads(storage):
    run_ranks(STORAGES[storage].world, _reads, storage)


def _set_learning_rates(optimizer: Any, chunk: Any) -> None:
    """As slime and verl: write to the groups, and set a child's list of groups."""
    for child in optimizer.chained_optimizers:
        child.param_groups = [{**group, "lr": 0.02} for group in child.param_groups]


def _write_learning_rates(optimizer: Any, chunk: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.02


def _same_writes(storage: str) -> None:
    written = train(STORAGES[storage], before_step=_write_learning_rates)
    written.assert_equals(train(STORAGES[storage], before_step=_set_learning_rates))
    other = train(STORAGES[storage])
    name = next(name for name in other.weights if name.endswith("linear_fc1.weight"))
    assert not torch.equal(other.weights[name], written.weights[name])


@pytest.mark.parametrize("storage", STORAGES)
def test_learning_rates_can_be_written_and_groups_be_set(storage):
    run_ranks(STORAGES[storage].world, _same_writes, storage)


def _reload(storage: str) -> None:
    """Write weights to the model from outside, as a loader of pretrained weights does."""
    chunk, optimizer = build(STORAGES[storage], "bfloat16")
    with torch.no_grad():
        for param in chunk.parameters():
            param.fill_(0.25)
    optimizer.reload_model_params()
    for param in main_params(optimizer):
        assert torch.all(param == 0.25)
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    gradients(chunk, optimizer, 0)
    optimizer.step()
    for name, param in chunk.named_parameters():
        # an optimizer that kept the old weights anywhere would write them back
        assert torch.all(param == 0.25), name


@pytest.mark.parametrize("storage", STORAGES)
def test_weights_written_from_outside_are_taken_over(storage):
    run_ranks(STORAGES[storage].world, _reload, storage)


def _reset_states(optimizer: Any, chunk: Any) -> None:
    """As slime between rollouts: forget momentum and steps, in place."""
    for child in optimizer.chained_optimizers:
        for group in child.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
    for state, key in state_tensors(optimizer):
        state[key].zero_()


def _reset(storage: str) -> None:
    """A reset state has to give the step that a fresh optimizer does."""
    chunk, optimizer = build(STORAGES[storage])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    gradients(chunk, optimizer, 0)
    optimizer.step()
    _reset_states(optimizer, chunk)
    fresh_chunk, fresh = build(STORAGES[storage])
    for held, model in ((optimizer, chunk), (fresh, fresh_chunk)):
        for group in held.param_groups:
            group["lr"], group["weight_decay"] = 0.01, 0.0
        gradients(model, held, 1)
        held.step()
    for (name, mine), theirs in zip(
        chunk.named_parameters(), fresh_chunk.parameters(), strict=True
    ):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("storage", ["replicated-muon", "distributed-adam", "layer-wise-muon"])
def test_states_can_be_reset_in_place(storage):
    run_ranks(STORAGES[storage].world, _reset, storage)
