"""Detects GPUs and tensors that GPU kernels can process, and copies values to the host."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def is_there() -> bool:
    """Return whether ``cuda`` is a real GPU; the CPU back end maps ``cuda`` to the CPU."""
    return torch.cuda.is_available() and torch.empty(0, device="cuda").is_cuda


def runs_kernels(tensor: Tensor) -> bool:
    """Return whether GPU code handles a tensor: one on a GPU, or a dry run's fake tensor."""
    return tensor.is_cuda or is_fake(tensor)


class HostCopy:
    """Copies a scalar from the device to the host without blocking; only ``read`` waits."""

    def __init__(self, value: Tensor) -> None:
        self._arrival: torch.cuda.Event | None = None
        self._copy = value
        if value.is_cuda:
            self._copy = torch.empty_like(value, device="cpu", pin_memory=True)
            self._copy.copy_(value, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    def read(self) -> float:
        """Wait for the copy and return the value."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return float(self._copy)
