"""DTensors and the local tensors in them."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_eopt.storage.uneven import uneven_kind


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
    if (kind := uneven_kind(param)) is not None:
        return kind.part_of(param, whole)
    mesh, placements = param.device_mesh, param.placements
    part: Tensor = local_of(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    return part


def shard_like(param: Tensor, local: Tensor) -> Tensor:
    """Return ``local``, on any device, as a tensor that is sharded and placed like ``param``."""
    if not isinstance(param, DTensor):
        return local
    meta = param._spec.tensor_meta
    assert meta is not None
    spec = replace(param._spec, tensor_meta=meta._replace(dtype=local.dtype))
    # as FSDP2 does; `from_local` would move what is off-loaded to the mesh's device
    return DTensor(local, spec, requires_grad=False)


def parts_of(tensor: DTensor) -> int:
    """Return the number of ranks that store different parts of a tensor."""
    extents = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in extents if not placement.is_replicate())
