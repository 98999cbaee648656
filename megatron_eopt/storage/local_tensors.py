"""DTensors and the local tensors in them."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_eopt.storage.units import own_rows, unit_of


def local_of(value: Any) -> Any:
    """Return a DTensor's local tensor, and any other value unchanged."""
    if not isinstance(value, DTensor):
        return value
    # `to_local` is differentiable, and would make this tensor part of a graph
    with torch.no_grad():
        return value.to_local()


def part_of(param: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor, cut like ``param``; all ranks have the whole tensor."""
    if not isinstance(param, DTensor):
        return whole
    if unit_of(param) is not None:
        return whole[own_rows(param)]
    if is_in_a_bucket(param):
        # without this attribute, each rank has the whole parameter
        held = getattr(param, "megatron_fsdp_slice", slice(None))
        return whole.reshape(-1)[held].view(local_of(param).shape)
    mesh, placements = param.device_mesh, param.placements
    part: Tensor = local_of(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    return part


def shard_like(param: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as a tensor that is sharded and placed like ``param``."""
    if not isinstance(param, DTensor):
        return local
    # The shape is given, because torch would multiply this rank's by the number of ranks, which is
    # wrong for uneven shards. A check would broadcast replicas.
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        # the check would all-gather shapes, which are known, and broadcast copies
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def is_in_a_bucket(param: Tensor) -> bool:
    """Return whether Megatron-FSDP's first version shards a parameter."""
    return isinstance(param, DTensor) and hasattr(param, "megatron_fsdp_dist_index")


def is_uneven(param: Tensor) -> bool:
    """Return whether Megatron-FSDP shards a parameter, otherwise than torch would."""
    return is_in_a_bucket(param) or unit_of(param) is not None
