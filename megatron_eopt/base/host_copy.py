"""A value of the device on its way to the host."""

import torch
from torch import Tensor


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
