"""Storage in DTensors: which ranks hold a parameter, as which shards, and what this rank has.

Megatron-FSDP gives each rank any number of rows of a tensor-parallel shard. In a fused weight such
a shard has a part of every logical matrix, so what a rank holds is a flat fragment of it, as in
Megatron's buffers, not a box of the whole weight. All other DTensors are boxes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import gather_objects, group_of_members
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts import Layout, dtensor_layout
from megatron_eopt.matrices import Split
from megatron_eopt.routing.parameters import ModelParameter
from megatron_eopt.routing.splits import tensor_parallel_cut
from megatron_eopt.storage.interface import MainShard
from megatron_eopt.storage.placed import refuse_part
from megatron_eopt.storage.replicated import Float32Optimizer, MainParamsOptimizer
from megatron_eopt.storage.shard import (
    Fragment,
    Ranks,
    Shard,
    box_layouts,
    fragment_layouts,
    global_name,
)

type ComputedBy = Callable[[Sequence[Layout]], Sequence[int]]
"""Returns a rank that computes each of some matrices."""
type Int64Array = npt.NDArray[np.int64]


class DTensorShards:
    """Finds out which ranks store which parts of DTensors; a whole tensor is this rank's own."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group_of(self, param: Tensor) -> dist.ProcessGroup | None:
        """Return the group of all ranks that store a part of ``param``; None for one rank.

        Meshes of several dimensions (HSDP, tensor parallelism) have one torch group per dimension
        only, so the group may be created here. All ranks of a mesh must call this in the same
        order.
        """
        if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
            return None
        mesh = param.device_mesh
        ranks = tuple(sorted(_ranks_in(param).ravel().tolist()))
        if ranks not in self._made:
            self._made[ranks] = mesh.get_group() if mesh.ndim == 1 else group_of_members(ranks)
        return self._made[ranks]

    def is_cut(self, param: Tensor) -> bool:
        """Return whether no rank stores the whole parameter."""
        if not isinstance(param, DTensor):
            return False
        extents = zip(param.placements, param.device_mesh.shape, strict=True)
        return any(size > 1 and not placement.is_replicate() for placement, size in extents)

    def shards(
        self,
        params: Mapping[str, Tensor],
        splits: Sequence[Split],
        group: dist.ProcessGroup | None,
        computed_by: ComputedBy,
    ) -> list[Shard]:
        """Return the shards of some parameters; collective over their :meth:`group_of`.

        Of several replicas, the one that includes the rank which computes a matrix is the source,
        because that rank has a part of it already.
        """
        return _shards(params, splits, group, computed_by)


def local_of(value: Any) -> Any:
    """Return a DTensor's local tensor, and any other value unchanged."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.to_local()


def shard_like(param: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as a tensor that is sharded and placed like ``param``."""
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


def is_uneven(param: Tensor) -> bool:
    """Return whether Megatron-FSDP shards a parameter."""
    return isinstance(param, DTensor) and hasattr(param, "megatron_fsdp_dist_index")


def _ranks_in(param: DTensor) -> Int64Array:
    """Return the global ranks of a mesh, in its shape; real values even for fake tensors."""
    with unset_fake_temporarily():
        return param.device_mesh.mesh.numpy()  # type: ignore[no-any-return]


def _mesh_in(param: DTensor, group: dist.ProcessGroup) -> Int64Array:
    """Return a parameter's device mesh in ranks of a group that contains it."""
    number = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(group))}
    ranks = _ranks_in(param)
    numbers = [number[rank] for rank in ranks.ravel().tolist()]
    return np.array(numbers, np.int64).reshape(ranks.shape)


def _shards(
    params: Mapping[str, Tensor],
    splits: Sequence[Split],
    group: dist.ProcessGroup | None,
    computed_by: ComputedBy,
) -> list[Shard]:
    held = _held_by_all(list(params.values()), group)
    layouts = [
        _layouts(name, param, split, group, held[:, number])
        for number, ((name, param), split) in enumerate(zip(params.items(), splits, strict=True))
    ]
    if group is not None:
        owners = iter(computed_by([layout for its in layouts for layout in its]))
        layouts = [
            tuple(layout.with_sources(_replica_of(next(owners), param, group)) for layout in its)
            for its, param in zip(layouts, params.values(), strict=True)
        ]
    return [
        Shard(
            name,
            split,
            its,
            Ranks.of(group),
            tuple(local_of(param).shape),
            global_name=global_name(param, name),
        )
        for (name, param), split, its in zip(params.items(), splits, layouts, strict=True)
    ]


def _held_by_all(params: Sequence[Tensor], group: dist.ProcessGroup | None) -> Int64Array:
    """Return the number of elements of each parameter on each rank, ``(ranks, parameters)``.

    Ranks communicate only if Megatron-FSDP shards a parameter; other layouts follow from
    placements.
    """
    mine = [local_of(param).numel() for param in params]
    asks = group is not None and any(map(is_uneven, params))
    gather_unique = gather_objects(mine, group) if asks else [mine]
    return np.array(gather_unique, np.int64).reshape(-1, len(mine))


def _layouts(
    name: str, param: Tensor, split: Split, group: dist.ProcessGroup | None, held: Int64Array
) -> tuple[Layout, ...]:
    """Return the layouts of a parameter's logical matrices."""
    cols = split.cols
    if group is None or not isinstance(param, DTensor):
        layout = Layout.whole((param.numel() // cols, cols), 0)
    elif is_uneven(param):
        return _fragments(param, split, _mesh_in(param, group), held)
    else:
        mesh, shape = _mesh_in(param, group), tuple(param.shape)
        layout = dtensor_layout(shape, mesh, param.placements, cols=cols, name=name)
    return box_layouts(split, layout)


def _fragments(
    param: DTensor, split: Split, mesh: Int64Array, held: Int64Array
) -> tuple[Layout, ...]:
    """Return the layouts of a Megatron-FSDP parameter, given how many elements each rank has."""
    index = param.megatron_fsdp_dist_index  # type: ignore[attr-defined]
    dims = list(param.device_mesh.mesh_dim_names or ())
    of_data, stops = dims.index(index.dp_shard_dim), held[mesh]
    starts = np.zeros_like(stops)
    if not param.placements[of_data].is_replicate():
        stops = np.cumsum(stops, axis=of_data)
        starts = stops - held[mesh]
    slabs, cut, size = np.zeros_like(mesh), -1, 1
    if index.tp_dim in dims:
        of_tensor = dims.index(index.tp_dim)
        slabs, size = np.indices(mesh.shape)[of_tensor], mesh.shape[of_tensor]
        cut = param.placements[of_tensor].dim  # type: ignore[attr-defined]
    order = np.argsort(mesh.ravel())
    table = np.stack([slabs.ravel(), starts.ravel(), stops.ravel()], axis=1)[order]
    return fragment_layouts(split, cut, size, [Fragment(*row) for row in table.tolist()])


def _replica_of(rank: int, param: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of the replica, a whole copy, that includes ``rank``."""
    assert isinstance(param, DTensor)
    mesh = _mesh_in(param, group)
    place = np.argwhere(mesh == rank)[0]
    copy = tuple(
        int(i) if placement.is_replicate() else slice(None)
        for i, placement in zip(place, param.placements, strict=True)
    )
    return np.atleast_1d(mesh[copy]).ravel().tolist()  # type: ignore[no-any-return]


def check_parameters(parameters: Sequence[ModelParameter]) -> None:
    """Raise for the first parameter that ranks would step differently, or not at all.

    Raises:
        ConfigurationError: If a parameter is on the meta device, a plain tensor among DTensors, or
            tensor-parallel outside its device mesh.
    """
    sharded = any(isinstance(item.param, DTensor) for item in parameters)
    for name, param in ((item.name, item.param) for item in parameters):
        if param.device.type == "meta":
            hint = "Call model.to_empty(device=...), initialize it, then build the optimizer"
            raise ConfigurationError(name, "meta device", "has no storage yet", hint)
        refuse_part(param, name)
        if sharded and not isinstance(param, DTensor):
            rule = "is a plain tensor among DTensors, so its gradient is not averaged over ranks"
            hint = "Let fully_shard manage it, or freeze it"
            raise ConfigurationError(name, tuple(param.shape), rule, hint)
        ranks, dim = tensor_parallel_cut(param) if sharded else (1, -1)
        if ranks > 1:
            rule = f"its mesh lacks the {ranks} tensor-parallel ranks that cut dimension {dim}"
            hint = "Call parallelize_module and fully_shard with submeshes of one device mesh"
            raise ConfigurationError(name, tuple(param.shape), rule, hint)


class LocalShards:
    """Exposes this rank's shards of DTensors; a mixin for wrappers of whole parameters."""

    def main_shards(self) -> Iterator[MainShard]:
        """Yield the parameters, with the size of this rank's shard."""
        for item in super().main_shards():  # type: ignore[misc]
            yield item._replace(stop=local_of(item.main).numel())

    def tensors_of(self, item: MainShard) -> dict[str, Any]:
        """Return this rank's main weights and state, by kind."""
        tensors = super().tensors_of(item)  # type: ignore[misc]
        return {kind: local_of(value) for kind, value in tensors.items()}

    def replica_of_matrix(self, param: Tensor, replica: Any) -> tuple[int, ...]:
        """Return the same on all ranks, because there are no copies of such state."""
        return (0, 0, 0)


class Float32Shards(LocalShards, Float32Optimizer):
    """For float32: steps the parameters' shards themselves."""


class MainShards(LocalShards, MainParamsOptimizer):
    """For bf16: steps float32 copies of the shards."""

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's shards of main weights and parameters."""
        return [(local_of(main), local_of(model)) for main, model in super().copies()]
