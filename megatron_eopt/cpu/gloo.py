"""Collectives that gloo lacks compared with NCCL, and process groups and meshes on CPUs."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
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
    """``all_to_all_single`` that accepts split sizes as tensors, which Megatron's MoE passes."""
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
    """``all_gather`` that accepts a different shape from each rank, as NCCL does."""
    rank = dist.get_rank(group)
    # all ranks pass the same shapes, so all take the same way; a rank outside the group has none
    if rank < 0 or len({entry.shape for entry in tensor_list}) <= 1:
        return plain(tensor_list, tensor, group=group, async_op=async_op)
    with torch.no_grad():
        tensor_list[rank].copy_(tensor)
    work = None
    for source, entry in enumerate(tensor_list):
        if entry.numel():
            work = dist.broadcast(entry, group_src=source, group=group, async_op=async_op)
    return work  # a gloo group works in order, so the last broadcast ends last


def _coalescing_by_dtype(plain: Function) -> Function:
    """Return a ``_coalescing_manager`` for gloo, which mixes up bytes of different dtypes."""

    @contextlib.contextmanager
    def manage(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        group = group or distributed_c10d._get_default_group()
        together, waiting = distributed_c10d._CoalescingManager(), distributed_c10d._world
        # torch collects calls in this table as long as the group has an entry
        waiting.pg_coalesce_state.setdefault(group, [])
        yield together
        # taken out of the table, so that each dtype gets a manager of torch's own
        calls = waiting.pg_coalesce_state.pop(group)
        for dtype in dict.fromkeys(call.tensor.dtype for call in calls):
            with plain(group, device, async_ops) as works:
                of_dtype = (call for call in calls if call.tensor.dtype == dtype)
                waiting.pg_coalesce_state[group].extend(of_dtype)
            together.works.extend(works.works)

    return manage


def gloo_patches() -> list[Patch]:
    """Return the patches; each collective has two names in torch."""
    manager = _coalescing_by_dtype(distributed_c10d._coalescing_manager)
    owners = (dist, distributed_c10d, param_and_grad_buffer)
    coalescing = [Patch(owner, "_coalescing_manager", manager) for owner in owners]
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
    return [*both, *coalescing, *group_patches(), mesh]


def group_patches() -> list[Patch]:
    """Return patches that create gloo groups with one worker thread and a shared network thread.

    Otherwise each of Megatron's dozens of groups has a network thread that wakes up a hundred times
    a second. GLOO_SOCKET_IFNAME selects network interfaces (comma-separated), as in torch. Torch
    releases without the patched function keep their own groups.

    Note [One worker thread a group]: torch gives a group two, which write the name of finished work
    to one string without a lock (``ProcessGroupGloo::runLoop`` in 2.15.0). Long names, such as
    Megatron-FSDP's ``ALLGATHER_COALESCED``, are on the heap and may be freed twice, which ends the
    process with ``malloc(): unaligned tcache chunk detected``.
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
        # after the first group, torch keeps the original function in this table
        ours = backend._BackendPlugin(create_gloo_process_group, True)
        patches.append(Patch(backend, "_plugins", {**backend._plugins, "GLOO": ours}))
    return patches


@around
def _on_cpu(plain: Function, group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
    """``DeviceMesh.from_group`` that builds GPU meshes on the CPU."""
    return plain(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)
