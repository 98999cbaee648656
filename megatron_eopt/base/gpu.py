"""Detects GPUs, runs work beside other work, and copies values between host and device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from megatron_eopt.base.errors import ConfigurationError


def is_there() -> bool:
    """Return whether ``cuda`` is a real GPU; the CPU back end maps ``cuda`` to the CPU."""
    return torch.cuda.is_available() and torch.empty(0, device="cuda").is_cuda


def needed_to_off_load(argument: str, optimizer: str) -> ConfigurationError:
    """Return the error for megatron-core's hybrid optimizer, which steps nothing on a CPU."""
    rule = f"megatron-core's optimizer that off-loads {optimizer} needs a GPU"
    hint = "Turn it off, or use another optimizer, which this package off-loads"
    return ConfigurationError(argument, True, rule, hint)


def uploaded(values: Any, device: torch.device) -> Tensor:
    """Return a numpy array as a tensor on a device, without waiting for it."""
    tensor = torch.from_numpy(values)
    if is_fake(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if device.type == "cuda":
        # a copy from pageable memory would make the host wait
        tensor = staging.pinned(tensor)
    return tensor.to(device, non_blocking=True)


class Staging:
    """Page-locked memory for uploads, also of those that a CUDA graph captures.

    A graph repeats its uploads in each replay. So what they read must stay, and since a capture
    cannot allocate page-locked memory, it is reserved before.
    """

    def __init__(self) -> None:
        self._used = 0  # bytes of the tables that kernels have read since the last reservation
        self._left = torch.empty(0, dtype=torch.uint8)
        self._kept: list[Tensor] = []  # what graphs read

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return a copy in page-locked memory."""
        if not torch.cuda.is_current_stream_capturing():
            return tensor.pin_memory()
        if _padded(tensor) > self._left.numel():
            raise RuntimeError("a captured step uploads more than twice what a step did before")
        place, self._left = self._left.tensor_split([_padded(tensor)])
        self._kept.append(place)
        return place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def note(self, table: Tensor) -> None:
        """Count a table that a kernel reads; keep it forever if a captured graph reads it."""
        self._used += _padded(table)
        if table.is_cuda and torch.cuda.is_current_stream_capturing():
            self._kept.append(table)

    def reserve(self) -> None:
        """Provide for a capture of what has been done since the last call, twice over."""
        wanted, self._used = 2 * self._used, 0
        if self._left.numel() < wanted:
            self._left = torch.empty(wanted, dtype=torch.uint8, pin_memory=is_there())


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 16) * 16


staging = Staging()
"""That of this process."""


class Table:
    """A numpy array on a device, for kernels on any stream."""

    def __init__(self, values: Any, device: torch.device) -> None:
        self._tensor = uploaded(values, device)
        self._is_captured = False
        if self._tensor.is_cuda:
            self._stream, self._is_captured = _stream_of(device)
            self._arrival = self._stream.record_event()

    def on_this_stream(self) -> Tensor:
        """Return it for a kernel that will be launched on the current stream."""
        table = self._tensor
        staging.note(table)
        if not table.is_cuda:
            return table
        stream, is_captured = _stream_of(table.device)
        if stream == self._stream:
            return table
        # a capture begins when the device is idle, and events do not leave it
        if is_captured == self._is_captured:
            stream.wait_event(self._arrival)
        if not is_captured:
            # else its memory could be used anew on the stream that uploaded it
            table.record_stream(stream)
        return table


def _stream_of(device: torch.device) -> tuple[Any, bool]:
    """Return the current stream, and whether a graph is being captured."""
    return torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing()


SIDE_STREAM = "MEGATRON_EOPT_SIDE_STREAM"
"""Environment variable; 0 makes all work of a step run on one stream."""


class SideStream:
    """A stream whose work runs beside that of the current one; on a CPU, in the same order.

    Memory that its block allocates may be freed while the current stream still uses it: later
    blocks wait for that.
    """

    def __init__(self) -> None:
        is_wanted = os.environ.get(SIDE_STREAM, "1") != "0" and is_there()
        self._stream: Any = torch.cuda.Stream() if is_wanted else None  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run a block after what has been launched, beside what will be launched."""
        if self._stream is None:
            yield
            return
        # what the block reads has been launched on the current stream
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream wait for all blocks."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class HostCopy:
    """Copies a small tensor from the device to the host without blocking; only ``read`` waits."""

    def __init__(self, value: Tensor) -> None:
        self._arrival: torch.cuda.Event | None = None
        self._copy = value
        if value.is_cuda:
            self._copy = torch.empty_like(value, device="cpu", pin_memory=True)
            self._copy.copy_(value, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # an event, so that reading waits for this copy and not for what is launched later
            self._arrival.record()

    def read(self) -> Any:
        """Wait for the copy and return the number, or a list of numbers."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy.tolist()
