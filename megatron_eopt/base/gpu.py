"""Detects GPUs, runs work beside other work, and copies values between host and device."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from megatron_eopt.base.errors import ConfigurationError


class StandIn(NamedTuple):
    """What acts as a GPU in a process that has none."""

    set_defaults: Callable[[Any], None]  # gives flags of the trainer defaults that work with it
    check_supported: Callable[[Any], None]  # raises for flags that need a GPU


stand_in: StandIn | None = None
"""What acts as this process's GPU, if anything does."""


def is_there() -> bool:
    """Return whether ``cuda`` is a real GPU; the CPU back end maps ``cuda`` to the CPU."""
    return torch.cuda.is_available() and torch.empty(0, device="cuda").is_cuda


def is_broken(device: torch.device) -> bool:
    """Return whether an error of a kernel, such as an illegal access, has ended all work there."""
    try:
        return bool(torch.zeros((), device=device))
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True


def lacks_memory(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, says that a GPU's memory is used up."""
    if error is None:
        return False
    # Triton and cuBLAS have no class for it
    told = any(text in str(error) for text in ("out of memory", "STATUS_ALLOC_FAILED"))
    return isinstance(error, torch.OutOfMemoryError) or told or lacks_memory(error.__cause__)


def within[T](seconds: float, function: Callable[[], T], device: torch.device) -> T:
    """Return what a function returns that uses a device, called in a thread of its own.

    Raises:
        TimeoutError: If it takes longer. It goes on, since nothing ends a kernel that hangs.
    """
    found: Future[T] = Future()

    def call() -> None:
        try:
            # threads have current devices of their own
            with torch.cuda.device_of(torch.empty(0, device=device)):  # type: ignore[no-untyped-call]
                found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return found.result(seconds)


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
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Table:
    """A numpy array on a device, for kernels on any stream."""

    def __init__(self, values: Any, device: torch.device) -> None:
        self._tensor = uploaded(values, device)
        if self._tensor.is_cuda:
            self._stream = torch.cuda.current_stream(device)
            self._arrival = self._stream.record_event()

    def on_this_stream(self) -> Tensor:
        """Return it for a kernel that will be launched on the current stream."""
        table = self._tensor
        stream = torch.cuda.current_stream(table.device) if table.is_cuda else None
        if stream is not None and stream != self._stream:
            stream.wait_event(self._arrival)
            # else its memory could be used anew on the stream that uploaded it
            table.record_stream(stream)
        return table


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
