"""What trainers and RL frameworks read, write and move between steps, with every storage."""

from typing import Any

import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer

from tests.harness import run_ranks
from tests.harness.models import assert_same, copies_of
from tests.harness.tiers import mostly_long
from tests.unit.contracts import callers
from tests.unit.contracts.callers import STORAGES, build, elsewhere, gradients, main_params, train

IN_PLACE = ("replicated-muon", "distributed-adam", "layer-wise-muon")
# stored as layer-wise Muon is
ALIKE = ("layer-wise-muon-plain-ddp", "layer-wise-soap")


def _offload_every_state_tensor(optimizer: Any, chunk: Any) -> None:
    """As NeMo-RL and slime: replace each state tensor by its copy on the host, and back."""
    for _ in range(2):
        for state, key in list(callers.state_tensors(optimizer)):
            state[key] = elsewhere(state[key])


def _offload_main_params(optimizer: Any, chunk: Any) -> None:
    """As verl: the tensor object stays, its memory is another one afterwards."""
    for param in main_params(optimizer):
        param.data = elsewhere(param.data)


def _offload_group_params(optimizer: Any, chunk: Any) -> None:
    """As megatron-core's ``offload_to_cpu``: through the parameter groups."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.data = elsewhere(param.data)


def _megatrons_offload(optimizer: Any, chunk: Any) -> None:
    optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()


def _release_model_memory(optimizer: Any, chunk: Any) -> None:
    """As verl and slime: free the memory of DDP's buffers, keep the tensors."""
    for buffer in chunk.buffers:
        for data, is_kept in ((buffer.param_data, True), (buffer.grad_data, False)):
            if data is not None:
                kept = data.clone() if is_kept else torch.zeros_like(data)
                memory = data.untyped_storage()
                size = memory.size()
                memory.resize_(0)
                memory.resize_(size)
                data.copy_(kept)


def _look_first(optimizer: Any, chunk: Any) -> None:
    """As AReaL and slime: ``prepare_grads``, then the norm."""
    assert not optimizer.prepare_grads()
    assert optimizer.get_grad_norm() > 0


AFTER_A_STEP = {
    "state": _offload_every_state_tensor,
    "main": _offload_main_params,
    "groups": _offload_group_params,
    "megatron": _megatrons_offload,
    "model": _release_model_memory,
}


def _same_training(storage: str, dtype: str) -> None:
    plain = train(STORAGES[storage], dtype)
    plain.assert_equals(train(STORAGES[storage], dtype, before_step=_look_first))
    if dtype == "float16":
        # the scale grows after two good steps, also when gradients are prepared twice in each
        assert [scale for *_, scale in plain.steps] == [64.0, 128.0, 128.0, 256.0]
        return
    for name, move in AFTER_A_STEP.items():
        try:
            plain.assert_equals(train(STORAGES[storage], dtype, after_step=move))
        except AssertionError as error:
            raise AssertionError(f"after moving {name}: {error}") from error


@pytest.mark.parametrize("dtype", mostly_long(callers.PRECISIONS, "bfloat16", "float16"))
@pytest.mark.parametrize("storage", mostly_long(STORAGES, *(STORAGES.keys() - ALIKE)))
def test_training_goes_on_as_if_nothing_had_been_moved_or_read(storage, dtype):
    run_ranks(STORAGES[storage].world, _same_training, storage, dtype)


def _overflow(storage: str) -> None:
    """Prepare gradients that overflow twice, leave the step out or not, then go on."""
    chunk, optimizer = build(STORAGES[storage], "float16")
    callers.scheduler_of(optimizer).step(2)
    told = []
    for step, (is_bad, do_step) in enumerate([(True, True), (True, False), (False, True)]):
        gradients(chunk, optimizer, step)
        if is_bad:
            chunk.buffers[0].grad_data.fill_(torch.inf)
        assert optimizer.prepare_grads() is is_bad
        done = optimizer.step()[0] if do_step else False
        told.append((done, float(optimizer.get_loss_scale())))
    # each counts once
    assert told == [(False, 32.0), (False, 16.0), (True, 16.0)]


def _reads(storage: str) -> None:
    chunk, optimizer = build(STORAGES[storage], "bfloat16")
    assert isinstance(optimizer, ChainedOptimizer)
    assert not optimizer.is_stub_optimizer
    assert optimizer.get_loss_scale().item() == 1.0
    assert optimizer.scale_loss(torch.tensor([3.0])).item() == 3.0
    assert float(optimizer.count_zeros() or 0) >= 0
    scheduler = callers.scheduler_of(optimizer)
    scheduler.step(2)
    for group in optimizer.param_groups:
        assert group["lr"] == 0.01
        assert group["is_decoupled_lr"] is False
    gradients(chunk, optimizer, 0)
    optimizer.step()
    assert all(state[key] is not None for state, key in callers.state_tensors(optimizer))
    assert sum(p.numel() for p in main_params(optimizer)) > 0
    resumed = callers.scheduler_of(build(STORAGES[storage], "bfloat16")[1])
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.optimizer.param_groups[0]["lr"] == 0.01


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


def _reset(storage: str) -> None:
    """As slime between rollouts: a state reset in place gives the step of a fresh optimizer."""
    chunk, optimizer = build(STORAGES[storage])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    gradients(chunk, optimizer, 0)
    optimizer.step()
    for child in optimizer.chained_optimizers:
        for group in child.optimizer.param_groups:
            if "step" in group:
                group["step"] = 0
    for state, key in callers.state_tensors(optimizer):
        state[key].zero_()
    fresh_chunk, fresh = build(STORAGES[storage])
    for held, model in ((optimizer, chunk), (fresh, fresh_chunk)):
        for group in held.param_groups:
            group["lr"], group["weight_decay"] = 0.01, 0.0
        gradients(model, held, 1)
        held.step()
    assert_same(copies_of(chunk), copies_of(fresh_chunk))


def _uses(storage: str) -> None:
    for use in (_overflow, _reads, _same_writes, _reload):
        use(storage)
    if storage in IN_PLACE:
        _reset(storage)


@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_read_and_written_is_megatrons(storage):
    run_ranks(STORAGES[storage].world, _uses, storage)
