"""Lets one process act as any rank of a job: fake process groups and fake tensors."""

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer
from torch import Tensor, distributed
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_eopt import cpu
from megatron_eopt.base import kernels
from megatron_eopt.base.agreement import GroupRank, answered_by, group_rank_in
from megatron_eopt.base.errors import ConfigurationError, check_integer
from megatron_eopt.base.live_bytes import DEVICE
from megatron_eopt.cpu.patches import Patch, patched
from megatron_eopt.math import newton_schulz
from megatron_eopt.optimizers import scalar
from megatron_eopt.tools.dry_run.counting import READ
from megatron_eopt.tools.dry_run.repeats import counting_once

_VIEWS = {
    torch.ops.aten.as_strided.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.view.default,
}
"""The operators that are called most, whose results share their first argument's memory."""

_COPY = torch.ops.aten.copy_.default
"""What DDP moves each weight to its buffers with; there is nothing to copy."""

_RECEIVING = {"alltoall_base_", "_allgather_base_", "allgather_"}
"""Collectives that fill tensors without values."""

_widens = newton_schulz.is_widened
# ``runs`` takes fake tensors for a GPU's; patched, it treats them like a CPU's
_LIKE_CPUS = [
    Patch(kernels.Family, "runs", lambda *_: False),
    Patch(newton_schulz, "is_widened", lambda _, __, dtype: _widens(torch.Tensor, "cpu", dtype)),
    Patch(scalar, "detect_fake_mode", lambda: None),
]

_LEFT_OUT = [
    Patch(param_and_grad_buffer, name, lambda _: False)
    for name in ("is_grouped_tensor_with_quantized_storage",)
    if hasattr(param_and_grad_buffer, name)
]
"""What DDP asks of each weight dozens of times: of a fake tensor, reading its data takes long."""

_COALESCED = ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_")
"""Collectives for which torch has no implementation with fake tensors."""


@contextmanager
def dry_world(
    rank: int,
    world_size: int,
    *,
    cuda: AbstractContextManager[None] | None = None,
    like_cpus: bool = False,
    real: bool = False,
) -> Iterator[None]:
    """Act as one rank of a simulated job inside a ``with`` block, and clean up afterwards.

    In the block tensors are fake, and answers of other ranks are derived from the process groups
    that Megatron creates. Megatron must not create gloo groups.

    Args:
        rank: The rank to act as.
        world_size: Number of ranks.
        cuda: Context that stands in for GPUs; by default the CPU back end.
        like_cpus: Whether fake tensors take the way of tensors on a CPU, instead of a GPU's.
        real: Whether tensors are real; what other ranks would send is then random.

    Raises:
        ConfigurationError: If the rank is out of range, ``torch.distributed`` is initialized, or
            torch is older than 2.11.
    """
    if torch.__version__ < "2.11.0a0":
        rule = "has no fake tensors for collectives, which plans need"
        raise ConfigurationError("torch", torch.__version__, rule, "Plan with 2.11 or later")
    check_integer("world_size", world_size)
    if not 0 <= rank < world_size:
        rule = f"must be one of the {world_size} ranks"
        raise ConfigurationError("rank", rank, rule, f"Give 0 to {world_size - 1}")
    if distributed.is_initialized():
        rule = "must not have a process group, because a dry run creates its own"
        raise ConfigurationError("this process", "initialized", rule, "Run it in another process")
    peers = _Peers(rank, world_size)
    environment = dict(os.environ)  # models change it when they choose an attention kernel
    distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    patches = [
        *(Patch(owner, "new_group", peers.new_group) for owner in (distributed, distributed_c10d)),
        # fake tensors cannot become bytes
        Patch(distributed, "all_gather_object", peers.all_gather_object),
        # device meshes read rank numbers, so their tensors must be real
        Patch(DeviceMesh, "from_group", staticmethod(_with_values(DeviceMesh.from_group))),
        Patch(DeviceMesh, "__init__", _with_values(DeviceMesh.__init__)),
        *([] if real else [counting_once(), *_LEFT_OUT]),
        *(_LIKE_CPUS if like_cpus else []),
    ]
    # real tensors from before the block, or from outside torch, may occur
    modes: list[Any] = [FakeTensorMode(allow_non_fake_inputs=True), _Values()]  # type: ignore[no-untyped-call]
    try:
        with (
            patched(patches),
            torch.library._scoped_library("c10d", "IMPL") as library,
            cuda or cpu.enabled(),
            answered_by(peers),
            ExitStack() as active,
        ):
            active.enter_context(torch.compiler.set_stance("force_eager"))
            for name in _COALESCED:
                library.impl(name, lambda *_, **__: FakeWork().boxed(), "Meta")
            for mode in [_Arrivals()] if real else modes:  # type: ignore[no-untyped-call]
                active.enter_context(mode)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)


class _Arrivals(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills what other ranks would send with small random numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and func.overloadpacket.__name__ in _RECEIVING:
            for received in tree_iter(args[0]):
                if isinstance(received, Tensor) and received.is_floating_point():
                    received.normal_(std=1e-3)
        return result


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns False, 0 or 1.0 when the host reads a value of a fake tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a dry world, and torch's guard costs each operator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:
            return args[0].device
        if func in _VIEWS and isinstance(args[0], FakeTensor) and args[0].constant is None:
            # torch's own way finds out how to, which takes most of a dry run's time
            mode, device = args[0].fake_mode, args[0].fake_device
            with in_kernel_invocation_manager(mode):
                return FakeTensor(mode, func(*args, **(kwargs or {})), device)
        if func is _COPY and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return args[0]
        if func is READ and isinstance(args[0], FakeTensor) and args[0].constant is None:
            kind = bool if args[0].dtype == torch.bool else int
            return 1.0 if args[0].is_floating_point() else kind(0)
        return func(*args, **(kwargs or {}))


def _with_values[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Run a function with real instead of fake tensors."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


class _Peers:
    """Records the process groups that are created and derives the other ranks' answers."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._size = rank, world_size
        self._groups: dict[str, list[list[int]]] = defaultdict(list)  # ranks, by description
        self._make = distributed.new_group

    def new_group(self, ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Create a fake group if this rank is a member, else only record the group's ranks."""
        members = list(range(self._size) if ranks is None else ranks)
        self._groups[kwargs.get("group_desc") or "undefined"].append(members)
        if self._rank not in members:
            return distributed.GroupMember.NON_GROUP_MEMBER
        kwargs["backend"] = "fake"
        return self._make(members, *args, **kwargs)

    def gather_objects[T](self, value: T, group: distributed.ProcessGroup | None) -> list[T]:
        """Return this rank's value for every rank."""
        # peers of one group do alike, except for what ``group_ranks`` tells
        return [value] * distributed.get_world_size(group)

    def all_gather_object(
        self, object_list: list[Any], value: Any, group: distributed.ProcessGroup | None = None
    ) -> None:
        """Do the same as torch's function."""
        object_list[:] = self.gather_objects(value, group)

    def group_ranks(self, group: distributed.ProcessGroup | None) -> list[GroupRank]:
        """Return every rank's position in its group with the same description and size."""
        if group is None:
            return [GroupRank(rank, 0) for rank in range(self._size)]
        members = distributed.get_process_group_ranks(group)
        if len(members) == self._size:
            return [group_rank_in(members, rank) for rank in range(self._size)]
        # Megatron gives all groups of one kind the same description
        alike = [g for g in self._groups[group.group_desc] if len(g) == len(members)]
        position_of = {rank: group_rank_in(ranks, rank) for ranks in alike for rank in ranks}
        return [position_of[rank] for rank in range(self._size)]
