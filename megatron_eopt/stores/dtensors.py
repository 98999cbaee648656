"""DTensors as storage: which ranks store them, as which shards, and what this rank has of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.places import Place, place_of
from megatron_eopt.base.subgroups import group_of_members
from megatron_eopt.layouts import Layout, dtensor_layout
from megatron_eopt.matrices import Split, matrix_rows
from megatron_eopt.routing.parameters import ModelParameter
from megatron_eopt.routing.splits import tensor_parallel_cut
from megatron_eopt.stores.interface import Stored
from megatron_eopt.stores.replicated import Float32Optimizer, MainParamsOptimizer
from megatron_eopt.stores.shard import Ranks, Shard, global_name
from megatron_eopt.stores.uneven import mesh_in, ranks_in, uneven_layouts

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class MeshGroups:
    """Process groups over whole device meshes, one for each set of ranks.

    HSDP and tensor parallelism have meshes of several dimensions, for which there is a group per
    dimension only. All ranks of a mesh must ask for its group in the same order.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, param: Tensor) -> dist.ProcessGroup | None:
        """Return the group of all ranks that store a part of ``param``; None for one rank."""
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            return None
        mesh = param.device_mesh
        ranks = tuple(sorted(ranks_in(mesh).ravel().tolist()))
        if ranks not in self._of:
            group: Any
            if mesh.ndim == 1:
                group = mesh.get_group()
            elif len(ranks) == dist.get_world_size():
                group = dist.group.WORLD
            else:
                group = group_of_members(ranks)
            self._of[ranks] = group
        return self._of[ranks]


def is_sharded(param: Tensor) -> bool:
    """Whether no rank stores the whole parameter."""
    if not isinstance(param, DTensor):
        return False
    extents = zip(param.placements, param.device_mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in extents)


def local_of(value: Any) -> Any:
    """Return a DTensor's local tensor, and anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.to_local()


def shard_like(param: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as a tensor that is cut and placed like ``param``."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def parameter_layout(name: str, param: Tensor, group: dist.ProcessGroup | None) -> Layout:
    """Return where a parameter's elements are, in the group that :meth:`MeshGroups.of` returns.

    It has two dimensions or more, of which all but the last are folded into rows.
    """
    shape = tuple(param.shape)
    if group is None or not isinstance(param, DTensor):
        return Layout.whole((int(np.prod(shape[:-1])), shape[-1]), 0)
    return dtensor_layout(shape, mesh_in(param, group), param.placements, name=name)


def dtensor_shards(
    params: Mapping[str, Tensor],
    splits: Sequence[Split],
    group: dist.ProcessGroup | None,
    computed_by: Any,
) -> list[Shard]:
    """Return the shards of some parameters; collective over the group.

    Of replicas the one sends to which the matrix's owner belongs, which so has a part already:
    ``computed_by``, called with all layouts, returns a rank that computes on each matrix.
    """
    of_params: list[Tensor] = []
    layouts: list[Layout] = []
    uneven = uneven_layouts(list(params.values()), splits, group)
    for (name, param), split in zip(params.items(), splits, strict=True):
        found = uneven.get(param) or _layouts_in_rows(parameter_layout(name, param, group), split)
        layouts += found
        of_params += [param] * len(found)
    if group is not None:
        layouts = [
            layout.with_sources(_replica_of(owner, param, group))
            for layout, param, owner in zip(layouts, of_params, computed_by(layouts), strict=True)
        ]
    remaining, ranks = iter(layouts), Ranks.of(group)
    return [
        Shard(
            name,
            split,
            tuple(islice(remaining, len(split.matrices))),
            ranks,
            tuple(local_of(param).shape),
            global_name=global_name(param, name),
        )
        for (name, param), split in zip(params.items(), splits, strict=True)
    ]


def _layouts_in_rows(layout: Layout, split: Split) -> tuple[Layout, ...]:
    """Return the layouts of the logical matrices that a parameter's rows are."""
    found = []
    for rows in matrix_rows(split, 1, 0, -1):
        order = np.argsort(rows.logical, kind="stable")
        found.append(layout.select_rows(rows.local[order], rows.length[order]))
    return tuple(found)


def _replica_of(rank: int, param: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return the ranks that hold a whole copy together, ``rank`` among them."""
    assert isinstance(param, DTensor)
    mesh = mesh_in(param, group)
    place = np.argwhere(mesh == rank)[0]
    copy = tuple(
        int(i) if placement.is_replicate() else slice(None)
        for i, placement in zip(place, param.placements, strict=True)
    )
    return np.atleast_1d(mesh[copy]).ravel().tolist()  # type: ignore[no-any-return]


def check_parameters(parameters: Sequence[ModelParameter]) -> None:
    """Raise for the first parameter that cannot be stepped as it is stored.

    Raises:
        ConfigurationError: See the messages.
    """
    if not parameters:
        rule = "has no parameter that requires a gradient"
        raise ConfigurationError("model", "no trainable parameter", rule, "Unfreeze some")
    meshes = [p.param.device_mesh for p in parameters if isinstance(p.param, DTensor)]
    sharded = any(mesh.size() > 1 for mesh in meshes)
    stored_by: dict[Place, str] = {}
    for item in parameters:
        _check_storage(item.name, item.param, sharded)
        local = local_of(item.param)
        if local.dtype not in _DTYPES:
            rule = f"must be one of {', '.join(map(str, _DTYPES))}"
            way_out = "Convert the model before sharding it"
            raise ConfigurationError(f"{item.name}.dtype", local.dtype, rule, way_out)
        other = stored_by.setdefault(place_of(local), item.name) if local.numel() else item.name
        if other != item.name:
            rule = f"shares its storage with {other}, so it would be stepped twice"
            way_out = "Tie weights by assigning the same Parameter before fully_shard"
            raise ConfigurationError("model", item.name, rule, way_out)


def _check_storage(name: str, param: nn.Parameter, sharded: bool) -> None:
    if param.device.type == "meta":
        way_out = "Call model.to_empty(device=...), initialize it, then build the optimizer"
        raise ConfigurationError(name, "meta device", "has no storage yet", way_out)
    if not isinstance(param, DTensor):
        if sharded:
            rule = "is a plain tensor beside DTensors, so no mesh manages it"
            way_out = (
                "Let fully_shard manage it, freeze it, or build the optimizer between passes, "
                "while everything is sharded"
            )
            raise ConfigurationError(name, tuple(param.shape), rule, way_out)
        return
    mesh = param.device_mesh
    shown = tuple(param.placements)
    for placement in shown:
        # strided shards are not instances of Shard in every version
        cut = isinstance(placement, ShardPlacement) or hasattr(placement, "split_factor")
        if not (cut or isinstance(placement, Replicate)):
            rule = "must be Shard or Replicate on every mesh dimension"
            raise ConfigurationError(name, shown, rule, "Redistribute the parameter")
    if mesh.get_coordinate() is None:
        rule = f"is on a mesh without rank {dist.get_rank()}"
        raise ConfigurationError(
            name, ranks_in(mesh).tolist(), rule, "Shard it over this rank's mesh"
        )
    local = param.to_local()
    if local.device.type != mesh.device_type:
        rule = f"is stored on {local.device.type}, but its mesh communicates on {mesh.device_type}"
        way_out = "Shard without CPUOffloadPolicy"
        raise ConfigurationError(name, shown, rule, way_out)
    ranks, dim = tensor_parallel_cut(param)
    if ranks > 1:
        rule = (
            f"is cut over {ranks} tensor-parallel ranks along dimension {dim}, and its mesh "
            f"{mesh.mesh_dim_names or mesh.shape} has no dimension for them"
        )
        way_out = "Cut it with parallelize_module on a mesh that fully_shard's mesh is a part of"
        raise ConfigurationError(name, shown, rule, way_out)


def uneven(params: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return names of parameters whose shards are of unequal size."""
    return [
        name
        for name, param in params
        if isinstance(param, DTensor)
        and any(
            placement.is_shard() and param.shape[placement.dim] % size  # type: ignore[attr-defined]
            for size, placement in zip(param.device_mesh.shape, param.placements, strict=True)
        )
    ]


class LocalShards:
    """Keeps this rank's shards of DTensors; stands before a wrapper of whole parameters."""

    def stored(self) -> Iterator[Stored]:
        """Yield the parameters, of which this rank has its shards."""
        for item in super().stored():  # type: ignore[misc]
            yield item._replace(stop=local_of(item.main).numel())

    def tensors_of(self, item: Stored) -> dict[str, Any]:
        """Return this rank's main weights and state, by kind."""
        tensors = super().tensors_of(item)  # type: ignore[misc]
        return {kind: local_of(value) for kind, value in tensors.items()}

    def replica_of_matrix(self, replica: Any) -> tuple[int, ...]:
        """Return the same on all ranks: they hold no copies of it."""
        return (0, 0, 0)


class Float32Shards(LocalShards, Float32Optimizer):
    """For float32: steps on the parameters' shards themselves."""


class MainShards(LocalShards, MainParamsOptimizer):
    """For bf16: steps on float32 copies of the shards."""
