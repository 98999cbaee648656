"""Parameters in the units of Megatron-FSDP's second version, and which of their rows a rank has.

``fully_shard`` of ``megatron_fsdp.experimental`` puts all parameters of a module into one flat
buffer, a unit, and cuts the buffer between rows. So a rank has any number of rows of a parameter,
perhaps none. Their DTensors do not tell which rows, but the layout of the buffer does, the same on
all ranks.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import ReferenceType

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.names import Int64Array
from megatron_eopt.layouts import Layout, block_layout


def unit_of(param: Tensor) -> Any:
    """Return the unit, in Megatron-FSDP's second version, that has a parameter; None if none."""
    if not isinstance(param, DTensor):
        return None
    unit = getattr(param, "_mfsdp_parameter_group", None)
    # newer releases of megatron-core keep a reference that does not keep the unit alive
    return unit() if isinstance(unit, ReferenceType) else unit


def units(params: Iterable[Tensor]) -> list[Any]:
    """Return the units of parameters, in the order of the model on all ranks."""
    return list(dict.fromkeys(unit for param in params if (unit := unit_of(param)) is not None))


def take_attributes(params: Iterable[Tensor]) -> None:
    """Give DTensors what was set on the whole parameters.

    ``fully_shard`` replaces parameters without their attributes, such as a declared split.
    """
    for unit in units(params):
        for whole, shard in _members(unit):
            # what was set later, on the DTensor, counts
            vars(shard).update({**vars(whole), **vars(shard)})


def kept_back(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return parameters whose gradients their units keep back, and those without a gradient.

    A unit reduces its gradients when each of its parameters has one of its own. Tied weights are
    two parameters with one gradient, so it waits for ever.
    """
    waiting: dict[int, Tensor] = {}
    missing = []
    for whole, shard in (member for unit in units(params) for member in _members(unit)):
        if whole.grad is not None and id(whole) not in waiting:
            waiting[id(whole)] = shard
        elif shard.grad is None:
            missing.append(shard)
    return list(waiting.values()), missing


def frozen_late(params: Iterable[Tensor]) -> Tensor | None:
    """Return a DTensor that was frozen after its unit was made, which goes on being trained."""
    members = (member for unit in units(params) for member in _members(unit))
    late = (shard for whole, shard in members if whole.requires_grad and not shard.requires_grad)
    return next(late, None)


def _members(unit: Any) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters of a unit, each whole and as a DTensor."""
    # newer releases of megatron-core keep both in one object
    if (members := getattr(unit, "fsdp_parameters", None)) is not None:
        return [(member.unsharded, member.sharded) for member in members]
    return list(zip(unit.unsharded_parameters, unit.sharded_parameters, strict=True))


def layout_in_unit(param: DTensor, mesh: Int64Array, cols: int, name: str) -> Layout:
    """Return the layout of a parameter whose mesh has these ranks; all copies are sources."""
    low = np.zeros((mesh.size, param.dim()), np.int64)
    high = np.tile(np.array(param.shape, np.int64), (mesh.size, 1))
    low[:, 0], high[:, 0] = _rows(param)
    sources = np.ones(mesh.size, bool)
    return block_layout(param.shape, low, high, mesh.ravel(), sources, cols=cols, name=name)


def own_rows(param: DTensor) -> slice:
    """Return which rows of a parameter this rank has."""
    mesh = param.device_mesh
    place = tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))
    first, last = (of_ranks.reshape(mesh.shape)[place] for of_ranks in _rows(param))
    return slice(int(first), int(last))


def _rows(param: DTensor) -> tuple[Int64Array, Int64Array]:
    """Return the first row of each rank of the mesh, and one past the last."""
    unit, numel = unit_of(param), param.numel()
    weights = unit.main_weight
    number = [id(shard) for _, shard in _members(unit)].index(id(param))
    starts, stops = _ranges(weights.layout, weights.placements, tuple(param.device_mesh.shape))
    # from elements of the buffer to rows of this parameter
    before, per_row = weights.layout.tensor_to_offset[number], param.shape[1:].numel()
    first, last = (np.clip(ends - before, 0, numel) // per_row for ends in (starts, stops))
    return first, last


class _Seat(NamedTuple):
    """A device mesh as one of its ranks sees it."""

    shape: tuple[int, ...]
    place: tuple[int, ...]

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def get_local_rank(self, axis: int) -> int:
        return self.place[axis]


@lru_cache(maxsize=256)
def _ranges(
    layout: Any, placements: tuple[Any, ...], mesh_shape: tuple[int, ...]
) -> tuple[Int64Array, Int64Array]:
    """Return where the part of each rank begins and ends in a unit's buffer."""
    seats = (_Seat(mesh_shape, place) for place in np.ndindex(*mesh_shape))
    parts = np.array([layout.get_local_range(seat, placements) for seat in seats], np.int64)
    return parts[:, 0], parts.sum(axis=1)
