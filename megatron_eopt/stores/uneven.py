"""DTensors as Megatron-FSDP cuts them: each rank has rows, of any number, of a slab.

Tensor parallelism cuts first. A fused weight's slab has a part of every logical matrix, so what a
rank holds is a fragment of a slab, as of Megatron's flat buffers, and no box of the whole.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron_eopt.base.agreement import of_every_rank
from megatron_eopt.layouts import Layout
from megatron_eopt.matrices import Split
from megatron_eopt.stores.shard import Fragment, fragment_layouts


def is_uneven(param: Tensor) -> bool:
    """Whether Megatron-FSDP has cut a parameter."""
    return isinstance(param, DTensor) and hasattr(param, "megatron_fsdp_dist_index")


def ranks_in(mesh: DeviceMesh) -> npt.NDArray[np.int64]:
    """Return a mesh's global ranks in its shape; they have values where no other tensor does."""
    with unset_fake_temporarily():
        return mesh.mesh.numpy()  # type: ignore[no-any-return]


def mesh_in(param: DTensor, group: dist.ProcessGroup) -> npt.NDArray[np.int64]:
    """Return a parameter's device mesh with ranks of a group that has all of them."""
    number = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(group))}
    ranks = ranks_in(param.device_mesh)
    numbers = [number[rank] for rank in ranks.ravel().tolist()]
    return np.array(numbers, np.int64).reshape(ranks.shape)


def uneven_layouts(
    params: Sequence[Tensor], splits: Sequence[Split], group: dist.ProcessGroup | None
) -> dict[Tensor, tuple[Layout, ...]]:
    """Return where the logical matrices of those parameters are that Megatron-FSDP has cut.

    Collective over the group of ranks that store them; no rank fails alone.
    """
    found = [(p, s) for p, s in zip(params, splits, strict=True) if is_uneven(p)]
    if group is None or not found:
        return {}
    sizes = of_every_rank([param.to_local().numel() for param, _ in found], group)  # type: ignore[attr-defined]
    held = np.array(sizes, np.int64).reshape(dist.get_world_size(group), len(found))
    return {
        param: _layouts(param, split, mesh_in(param, group), held[:, number])  # type: ignore[arg-type]
        for number, (param, split) in enumerate(found)
    }


def _layouts(
    param: DTensor, split: Split, mesh: npt.NDArray[np.int64], held: npt.NDArray[np.int64]
) -> tuple[Layout, ...]:
    """Return one parameter's layouts, of which the ranks of a group hold so many elements."""
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
