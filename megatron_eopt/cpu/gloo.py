"""Collectives that NCCL has and gloo lacks, and groups and meshes of CPU processes."""

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.cpu.patches import Patch


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


@around
def _all_to_all_with_tensor_sizes(
    plain: Function,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``all_to_all_single`` that also takes its split sizes as tensors.

    Megatron's MoE dispatcher passes them so unless they are on a GPU.
    """
    sizes = _as_list(output_split_sizes), _as_list(input_split_sizes)
    return plain(output, input, *sizes, *args, **kwargs)


@around
def _all_gather_of_any_sizes(
    plain: Function,
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """``all_gather`` that also takes tensors of another shape from every rank.

    As with NCCL, the list has the shapes of the ranks' tensors, the same list on every rank.
    """
    rank = dist.get_rank(group)
    if rank < 0 or len({entry.shape for entry in tensor_list}) <= 1:
        return plain(tensor_list, tensor, group=group, async_op=async_op)
    with torch.no_grad():
        tensor_list[rank].copy_(tensor)
    work = None
    for source, entry in enumerate(tensor_list):
        if entry.numel():
            work = dist.broadcast(entry, group_src=source, group=group, async_op=async_op)
    return work  # a group of gloo works in order, so that the last one ends last


def gloo_patches() -> list[Patch]:
    """Return the replacements, each collective's under both names that torch gives it."""
    functions = (
        _all_to_all_with_tensor_sizes(distributed_c10d.all_to_all_single),
        _all_gather_of_any_sizes(distributed_c10d.all_gather),
    )
    both = [
        Patch(owner, function.__name__, function)
        for owner in (dist, distributed_c10d)
        for function in functions
    ]
    mesh = Patch(DeviceMesh, "from_group", staticmethod(_on_cpu(DeviceMesh.from_group)))
    return [*both, *group_patches(), mesh]


def group_patches() -> list[Patch]:
    """Return the replacement that makes groups with a worker thread each, and one network thread.

    Their network is the interfaces of GLOO_SOCKET_IFNAME, divided by commas, as of torch's groups.
    Each group has a network thread of its own otherwise, which wakes up a hundred times a second,
    and Megatron makes dozens of groups. Releases of torch without the function to replace stay as
    they are.

    Note [One worker thread a group]: torch gives a group two, and both write the name of the work
    they have ended into one string of the group, without a lock (``ProcessGroupGloo::runLoop`` of
    2.15.0). Names of more than 15 letters, as ``ALLGATHER_COALESCED`` of Megatron-FSDP, are on the
    heap: freed twice, the process ends with ``malloc(): unaligned tcache chunk detected``.
    """
    if not hasattr(distributed_c10d, "_create_gloo_process_group"):
        return []
    gloo: Any = dist.ProcessGroupGloo

    @functools.cache
    def devices(interfaces: str) -> list[Any]:
        if not interfaces:
            return [gloo.create_default_device()]
        return [gloo.create_device(interface=name) for name in interfaces.split(",")]

    def create_gloo_process_group(wanted: Any, backend_options: object | None) -> Any:
        options = gloo._Options()
        options._devices = devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = 1  # see Note [One worker thread a group]
        options._timeout = wanted.timeout
        options.enable_reconfigure = wanted.enable_reconfigure
        group = gloo(wanted.store, wanted.group_rank, wanted.group_size, options)
        group.options.global_ranks_in_group = wanted.global_ranks_in_group
        group.options.group_name = wanted.group_id
        return group

    patches = [Patch(distributed_c10d, "_create_gloo_process_group", create_gloo_process_group)]
    backend: Any = distributed_c10d.Backend
    if "GLOO" in backend._plugins:
        # once the first group exists torch has looked the function up
        ours = backend._BackendPlugin(create_gloo_process_group, True)
        patches.append(Patch(backend, "_plugins", {**backend._plugins, "GLOO": ours}))
    return patches


@around
def _on_cpu(plain: Function, group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
    """``DeviceMesh.from_group`` that builds meshes of GPUs on the CPU."""
    return plain(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)
