"""AReaL and slime look at the gradients before they step: ``prepare_grads``, then the norm."""

from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_eopt import get_megatron_optimizer
from tests.harness import run_ranks
from tests.unit.contracts.callers import STORAGES, build, gradients, scheduler_of, train


def _look_first(optimizer: Any, chunk: Any) -> None:
    assert not optimizer.prepare_grads()
    assert optimizer.get_grad_norm() > 0


def _same_training(storage: str, dtype: str) -> None:
    plain = train(STORAGES[storage], dtype)
    train(STORAGES[storage], dtype, before_step=_look_first).assert_equals(plain)
    if dtype == "float16":
        # the scale grows after two good steps, also when gradients are prepared twice in each
        assert [scale for *_, scale in plain.steps] == [64.0, 128.0, 128.0, 256.0]


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16", "float16"]
)
@pytest.mark.parametrize("storage", STORAGES)
def test_looking_at_the_gradients_first_changes_nothing(storage, dtype):
    run_ranks(STORAGES[storage].world, _same_training, storage, dtype)


def _overflow(storage: str) -> list[tuple[bool, float]]:
    """Prepare gradients that overflow twice, leave the step out or not, then go on."""
    chunk, optimizer = build(STORAGES[storage], "float16")
    scheduler_of(optimizer).step(2)
    told = []
    for step, (is_bad, do_step) in enumerate([(True, True), (True, False), (False, True)]):
        gradients(chunk, optimizer, step)
        if is_bad:
            chunk.buffers[0].grad_data.fill_(torch.inf)
        assert optimizer.prepare_grads() is is_bad
        done = optimizer.step()[0] if do_step else False
        told.append((done, float(optimizer.get_loss_scale())))
    return told


@pytest.mark.parametrize("storage", ["replicated-muon", "distributed-adam", "layer-wise-muon"])
def test_an_overflow_counts_once(storage):
    found = run_ranks(STORAGES[storage].world, _overflow, storage)
    assert found == [[(False, 32.0), (False, 16.0), (True, 16.0)]] * len(found)


def _by_position() -> None:
    storage = STORAGES["layer-wise-muon"]
    chunk, optimizer = build(storage)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    again = get_megatron_optimizer(optimizer.config, [chunk], None, False, collection, None)
    assert [len(group["params"]) for group in again.param_groups] == [
        len(group["params"]) for group in optimizer.param_groups
    ]


def test_areal_calls_the_factory_by_position():
    run_ranks(2, _by_position)
