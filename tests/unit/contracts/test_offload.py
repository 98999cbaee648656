"""RL frameworks move main parameters and state off the device between training phases."""

from typing import Any

import pytest

from tests.harness import run_ranks
from tests.unit.contracts.callers import (
    STORAGES,
    elsewhere,
    main_params,
    state_tensors,
    train,
)


def _offload_every_state_tensor(optimizer: Any, chunk: Any) -> None:
    """As NeMo-RL and slime: replace each state tensor by its copy on the host, and back."""
    for _ in range(2):
        for state, key in list(state_tensors(optimizer)):
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
        if buffer.param_data is not None:
            kept = buffer.param_data.clone()
            size = buffer.param_data.untyped_storage().size()
            buffer.param_data.untyped_storage().resize_(0)
            buffer.param_data.untyped_storage().resize_(size)
            buffer.param_data.copy_(kept)
        size = buffer.grad_data.untyped_storage().size()
        buffer.grad_data.untyped_storage().resize_(0)
        buffer.grad_data.untyped_storage().resize_(size)
        buffer.grad_data.zero_()


MOVES = {
    "state": _offload_every_state_tensor,
    "main": _offload_main_params,
    "groups": _offload_group_params,
    "megatron": _megatrons_offload,
    "model": _release_model_memory,
}


def _same_training(storage: str, dtype: str) -> None:
    plain = train(STORAGES[storage], dtype)
    for name, move in MOVES.items():
        moved = train(STORAGES[storage], dtype, after_step=move)
        try:
            plain.assert_equals(moved)
        except AssertionError as error:
            raise AssertionError(f"after moving {name}: {error}") from error


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize("storage", STORAGES)
def test_training_goes_on_as_if_nothing_had_moved(storage, dtype):
    run_ranks(STORAGES[storage].world, _same_training, storage, dtype)
