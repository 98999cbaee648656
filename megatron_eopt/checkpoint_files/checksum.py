"""A checksum of model and optimizer state that does not depend on how the ranks share it.

Every element counts once, as a hash of its tensor's name, its place in the unsharded tensor and its
bits. The sum of all hashes modulo 2^64 is exact and the same in every order.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, is_main_replica
from megatron.core.utils import unwrap_model
from torch import Tensor, distributed

from megatron_eopt.base.agreement import device_of_collectives
from megatron_eopt.checkpoint.keys import split_key, tensors

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS_AT_ONCE = 1 << 22


def checksum(model_chunks: Sequence[Any], optimizer: Any = None) -> str:
    """Return a checksum of all state tensors; all ranks call this together.

    It covers parameters and buffers of the model and all state of the optimizer (main parameters,
    moments, counters, ...) with its step count, as a checkpoint holds them. Equal state gives equal
    checksums under any layout that pads the vocabulary to the same size; random number states are
    left out. megatron-core's distributed optimizer gathers its state on the first data-parallel
    rank for it.

    Args:
        model_chunks: This rank's model chunks, wrapped or not.
        optimizer: Optimizer of these; None leaves optimizer state out.

    Returns:
        16 hexadecimal digits.
    """
    state = _model_state(model_chunks)
    steps = 0
    if optimizer is not None and not optimizer.is_stub_optimizer:
        metadata = _metadata()
        state["optimizer"] = optimizer.sharded_state_dict(
            _model_state(model_chunks, metadata), is_loading=False, metadata=metadata
        )
        steps = _steps(optimizer)
    device = device_of_collectives()
    total = torch.zeros((), dtype=torch.int64, device=device)
    for item in tensors(state):
        if item.data is not None and is_main_replica(item.replica_id):
            total += _hash(item).to(device)
    for number in _numbers(state):
        total += _mix(torch.tensor(number, device=device))
    most = torch.tensor(steps, dtype=torch.int64, device=device)
    if distributed.is_initialized():
        distributed.all_reduce(total)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
    total += _mix(most + hash_of_text("steps"))
    return f"{int(total) % 2**64:016x}"


def hash_of_text(text: str) -> int:
    """Return a number below 2^63 that stands for ``text``."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _model_state(chunks: Sequence[Any], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    unwrapped = unwrap_model(list(chunks))
    names = ["model"] if len(unwrapped) == 1 else [f"model{n}" for n in range(len(unwrapped))]
    return {
        name: chunk.sharded_state_dict(metadata=metadata or _metadata())
        for name, chunk in zip(names, unwrapped, strict=True)
    }


def _numbers(state: Any) -> Iterator[int]:
    """Yield a hash of each number among the optimizer's state that is no tensor."""
    for item in nested_values(state):
        is_number = isinstance(item, ShardedObject) and isinstance(item.data, int | float)
        if is_number and split_key(item.key) is not None and is_main_replica(item.replica_id):
            yield hash_of_text(f"{item.key} {item.data!r}")


def _steps(optimizer: Any) -> int:
    """Return the largest step count of the optimizer's parameter groups on this rank."""
    return max((int(group.get("step") or 0) for group in optimizer.param_groups), default=0)


def _hash(item: ShardedTensor) -> Tensor:
    """Return the sum of the hashes of a shard's elements, a scalar int64 tensor."""
    data = item.data.detach().reshape(-1)
    key = hash_of_text(item.key)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _ELEMENTS_AT_ONCE):
        part = data[start : start + _ELEMENTS_AT_ONCE].contiguous()
        places = torch.arange(start, start + part.numel(), device=data.device)
        bits = part.view(_INTEGERS[part.element_size()]).to(torch.int64)
        total += _mix(_mix(_global_places(places, item) + key) ^ _mix(bits)).sum()
    return total


def _global_places(places: Tensor, item: ShardedTensor) -> Tensor:
    """Turn places in a flattened shard into places in the flattened unsharded tensor."""
    result = torch.zeros_like(places)
    index = (*[0] * item.prepend_axis_num, *torch.unravel_index(places, item.local_shape))
    for at, offset, extent in zip(index, item.global_offset, item.global_shape, strict=True):
        result = result * extent + (at + offset)
    return result


def _mix(numbers: Tensor) -> Tensor:
    """Scatter int64 numbers over all 64 bits; every bit of the input reaches every output bit."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Shift int64 numbers to the right, filling with zeros."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
