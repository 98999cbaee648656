"""Whether there is a GPU, which code serves a tensor, and how a value of it comes to the host."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def is_there() -> bool:
    """Return whether ``cuda`` is a GPU: a back end may let it mean the CPU."""
    return torch.cuda.is_available() and torch.empty(0, device="cuda").is_cuda


def runs_kernels(tensor: Tensor) -> bool:
    """Return whether a GPU's code serves a tensor: it is on one, or has no data.

    A dry run plans for GPUs, so its tensors take the same way.
    """
    return tensor.is_cuda or is_fake(tensor)


class HostCopy:
    """Copies a value of the device without waiting; whoever reads it later waits for it alone."""

    def __init__(self, value: Tensor) -> None:
        self._arrival: torch.cuda.Event | None = None
        self._copy = value
        if value.is_cuda:
            self._copy = torch.empty_like(value, device="cpu", pin_memory=True)
            self._copy.copy_(value, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    def read(self) -> float:
        """Return the value."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return float(self._copy)
