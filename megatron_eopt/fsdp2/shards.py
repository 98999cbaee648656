"""DTensors as storage: their ranks, their layouts, and this rank's shards as plain tensors."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.names import TpModeT
from megatron_eopt.layouts import Layout, dtensor_layout
from megatron_eopt.matrices import Split, matrix_rows
from megatron_eopt.optimizers.engine import DEFAULT_WAVE_BYTES
from megatron_eopt.optimizers.modes import plan_work
from megatron_eopt.optimizers.stored import PlacedParameter

__all__ = [
    "Groups",
    "is_sharded",
    "local_of",
    "parameter_layout",
    "placed_parameters",
    "shard_like",
]


class Groups:
    """Process groups over whole device meshes, one for each set of ranks.

    HSDP and tensor parallelism have meshes of several dimensions, for which there is a group per
    dimension only. All ranks of a mesh must ask for its group in the same order.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def of(self, param: Tensor) -> dist.ProcessGroup | None:
        """Return the group of all ranks that store a part of ``param``; None for one rank."""
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            return None
        mesh = param.device_mesh
        ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
        if ranks not in self._of:
            if mesh.ndim == 1:
                self._of[ranks] = mesh.get_group()
            elif len(ranks) == dist.get_world_size():
                self._of[ranks] = dist.group.WORLD
            else:
                group = dist.new_group(list(ranks), use_local_synchronization=True)
                assert isinstance(group, dist.ProcessGroup)
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
    """Return where a parameter's elements are; leading dimensions are folded into rows.

    Args:
        name: Its name, for messages.
        param: Of two dimensions or more.
        group: The ranks that store it, as :meth:`Groups.of` returns them.
    """
    shape = tuple(param.shape)
    if group is None or not isinstance(param, DTensor):
        return Layout.whole((int(np.prod(shape[:-1])), shape[-1]), 0)
    return dtensor_layout(shape, _mesh(param, group), param.placements, name=name)


def placed_parameters(
    params: Mapping[str, Tensor],
    splits: Sequence[Split],
    group: dist.ProcessGroup | None,
    mode: TpModeT,
) -> list[PlacedParameter]:
    """Return where each logical matrix of some parameters is stored.

    Of replicas the one sends to which the matrix's owner belongs, which so has a part already.

    Args:
        params: Parameters by name.
        splits: The logical matrices of each.
        group: The ranks that store them; None for one.
        mode: Where the work will happen.
    """
    layouts = []
    for (name, param), split in zip(params.items(), splits, strict=True):
        layout = parameter_layout(name, param, group)
        for rows in matrix_rows(split, 1, 0, -1):
            order = np.argsort(rows.logical, kind="stable")
            layouts.append((param, layout.select_rows(rows.local[order], rows.length[order])))
    if group is not None:
        size = dist.get_world_size(group)
        work = plan_work([layout for _, layout in layouts], size, mode, DEFAULT_WAVE_BYTES)
        layouts = [
            (
                param,
                layout.with_sources(_replica_of(int(matrix.compute.boxes.rank[0]), param, group)),
            )
            for (param, layout), matrix in zip(layouts, work.matrices, strict=True)
        ]
    remaining = iter(layout for _, layout in layouts)
    return [
        PlacedParameter(name, split, tuple(islice(remaining, len(split.matrices))))
        for name, split in zip(params, splits, strict=True)
    ]


def _mesh(param: DTensor, group: dist.ProcessGroup) -> npt.NDArray[np.int64]:
    """Return a device mesh with ranks of the group."""
    number = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(group))}
    ranks = param.device_mesh.mesh
    numbers = [number[rank] for rank in ranks.flatten().tolist()]
    return np.array(numbers, np.int64).reshape(tuple(ranks.shape))


def _replica_of(rank: int, param: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return the ranks that hold a whole copy together, ``rank`` among them."""
    assert isinstance(param, DTensor)
    mesh = _mesh(param, group)
    place = np.argwhere(mesh == rank)[0]
    copy = tuple(
        int(i) if placement.is_replicate() else slice(None)
        for i, placement in zip(place, param.placements, strict=True)
    )
    return np.atleast_1d(mesh[copy]).ravel().tolist()  # type: ignore[no-any-return]
