"""What ``torch.cuda`` and ``torch.accelerator`` offer while the CPU plays the GPU.

A CPU computes in program order, so a stream is always idle and an event has always happened.
"""

import collections
import contextlib
import os
import time
import types
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_eopt.cpu.patches import Patch

# below 10, Megatron asks for CUDA_DEVICE_MAX_CONNECTIONS=1, which means nothing on a CPU
COMPUTE_CAPABILITY = (10, 0)


class Event:
    """An event of a stream that is always idle: it has happened as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, *args: Any) -> None:
        """Note the time, for :meth:`elapsed_time`."""
        self._recorded_s = time.perf_counter()

    def wait(self, *args: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return that the event has happened."""
        return True

    def elapsed_time(self, other: "Event") -> float:
        """Return the milliseconds from this event to ``other``."""
        return (other._recorded_s - self._recorded_s) * 1e3


class Stream:
    """A stream that is always idle."""

    device = torch.device("cpu")
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None:
        """Return at once."""

    def wait_event(self, *args: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return that no work is left."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, and return it."""
        event = event or Event()
        event.record()
        return event


STREAM = Stream()


@dataclass(frozen=True)
class DeviceProperties:
    """The properties of the CPU under the names of a GPU's; memory in bytes."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int


def _properties(*args: Any) -> DeviceProperties:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceProperties("cpu", *COMPUTE_CAPABILITY, memory, os.cpu_count() or 1)


def _device_count() -> int:
    """As many devices as the launcher started processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _no_bytes(*args: Any, **kwargs: Any) -> int:
    return 0


def _no_statistics(*args: Any, **kwargs: Any) -> collections.defaultdict[str, int]:
    return collections.defaultdict(int)


def _null_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _cuda_values() -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        # makes torch run what it otherwise puts off until the first use of a GPU
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": _device_count,
        "current_device": lambda: 0,
        "get_device_properties": _properties,
        "get_device_capability": lambda *args, **kwargs: COMPUTE_CAPABILITY,
        "get_device_name": lambda *args, **kwargs: "cpu",
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *args, **kwargs: STREAM,
        "default_stream": lambda *args, **kwargs: STREAM,
        "stream": _null_context,
        "device": _null_context,
        "memory_stats": _no_statistics,
        "mem_get_info": lambda *args: (_properties().total_memory,) * 2,
        **dict.fromkeys(
            ("set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect"), _nothing
        ),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), _nothing),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), _no_bytes),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved"), _no_bytes),
    }


def _accelerator_values() -> dict[str, Any]:
    """No accelerator: torch's own libraries (the data loader) must not look for one."""
    return {
        "is_available": lambda: False,
        "device_count": lambda: 0,
        "current_accelerator": lambda check_available=False: None,
        "current_device_index": lambda: 0,
        **dict.fromkeys(("synchronize", "empty_cache", "set_device_index"), _nothing),
    }


def _one_of_a_kind(value: Any) -> Any:
    """A function of its own for every name: Dynamo refuses one function under two names."""
    if not isinstance(value, types.FunctionType):
        return value
    return lambda *args, **kwargs: value(*args, **kwargs)


def cuda_patches() -> list[Patch]:
    """Return the replacements for the parts of ``torch.cuda`` and ``torch.accelerator`` in use."""
    patches = [
        *(Patch(torch.cuda, name, value) for name, value in _cuda_values().items()),
        *(Patch(torch.accelerator, name, value) for name, value in _accelerator_values().items()),
    ]
    return [replace(patch, value=_one_of_a_kind(patch.value)) for patch in patches]
