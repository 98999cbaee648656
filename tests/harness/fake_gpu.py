"""GPUs that are not there: for a dry world whose tensors lie on ``cuda``, not on the CPU.

Tensors have no data; but operations of tensors of two devices fail as on a GPU, and what would let
the host and the device wait for each other can be seen.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron_eopt.base.gpu import HostCopy
from megatron_eopt.cpu.cuda_standins import Stream, cuda_patches
from megatron_eopt.cpu.generators import Generators
from megatron_eopt.cpu.patches import Patch, patched
from megatron_eopt.tools.dry_run.counting import READ, who_reads


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Let torch make fake tensors on ``cuda`` without a GPU."""
    # operations then ask no update rule which device is the current one
    torch._C._ensureCUDADeviceGuardSet()
    generators = Generators()
    patches = [
        *cuda_patches(),
        *generators.patches(),
        Patch(torch.cuda, "_lazy_init", lambda: None),
        Patch(torch, "Stream", Stream),
        Patch(torch, "tensor", _by_way_of_the_host(torch.tensor)),
    ]
    # the method is its base class's, which is written in C
    with patched(patches), patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
        try:
            yield
        finally:
            generators.unite()


def _by_way_of_the_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``make`` without what only an update rule can do: copy values to a device at once."""

    @functools.wraps(make)
    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        device = torch.get_default_device() if device is None else torch.device(device)
        on_host = make(*args, device="cpu", **kwargs)
        if device.type == "cpu":
            return on_host
        return torch.empty(on_host.shape, dtype=on_host.dtype, device="cpu").to(device)

    return made


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what lets the host and a device wait for each other while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: set[str] = set()  # functions that read a value of a device
        self.crossings: list[str] = []  # operations with tensors of both: mostly copies

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is READ and args[0].is_cuda:
            self.reads.add(who_reads() or "?")
        result = func(*args, **(kwargs or {}))
        tensors = (item for item in tree_iter((args, kwargs, result)) if torch.is_tensor(item))
        both = {"cpu", "cuda"} <= {tensor.device.type for tensor in tensors}
        # nobody waits for what goes to memory that is pinned for it
        callers = (frame.f_globals.get("__name__") for frame, _ in walk_stack(None))
        if both and HostCopy.__module__ not in callers:
            self.crossings.append(str(func))
        return result
