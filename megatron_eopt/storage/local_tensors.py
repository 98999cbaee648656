"""DTensors and the local tensors in them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_of(value: Any) -> Any:
    """Return a DTensor's local tensor, and any other value unchanged."""
    if not isinstance(value, DTensor):
        return value
    # `to_local` is differentiable, and would make this tensor part of a graph
    with torch.no_grad():
        return value.to_local()


def shard_like(param: Tensor, local: Tensor) -> Tensor:
    """Return ``local``, on any device, as a tensor that is sharded and placed like ``param``."""
    if not isinstance(param, DTensor):
        return local
    meta = param._spec.tensor_meta
    assert meta is not None
    spec = replace(param._spec, tensor_meta=meta._replace(dtype=local.dtype))
    # as FSDP2 does; `from_local` would move what is off-loaded to the mesh's device
    return DTensor(local, spec, requires_grad=False)


def is_uneven(param: Tensor) -> bool:
    """Return whether Megatron-FSDP shards a parameter."""
    return isinstance(param, DTensor) and hasattr(param, "megatron_fsdp_dist_index")
