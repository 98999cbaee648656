"""CPU replacements for functions of ``torch.cuda`` and ``torch.accelerator``.

A CPU computes in program order, so streams are always idle and events complete at once.
"""

import collections
import contextlib
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_eopt.cpu.patches import Patch

# below 10, Megatron requires CUDA_DEVICE_MAX_CONNECTIONS=1, which has no meaning on a CPU
COMPUTE_CAPABILITY = (10, 0)


class Event(torch.cpu.Event):
    """An event that completes as soon as it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, stream: Any = None) -> None:
        """Save the time for :meth:`elapsed_time`."""
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, other: "Event") -> float:
        """Return the milliseconds from this event to ``other``."""
        return (other._recorded_s - self._recorded_s) * 1e3


class Stream(torch.cpu.Stream):
    """A stream that is always idle."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None:
        """Return at once."""

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """Record ``event``, or a new one, and return it."""
        event = event or Event()
        event.record()
        return event


def _returns(value: Any = None) -> Callable[..., Any]:
    """Return a new function, because Dynamo rejects one function under two names."""
    return lambda *args, **kwargs: value


def _cuda_values() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = SimpleNamespace(
        name="cpu",
        major=COMPUTE_CAPABILITY[0],
        minor=COMPUTE_CAPABILITY[1],
        total_memory=memory,
        multi_processor_count=os.cpu_count() or 1,
    )
    nothing = "set_device set_stream synchronize empty_cache reset_peak_memory_stats"
    sizes = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
    stream = Stream()
    return {
        # Megatron and its dependencies take other ways, or stop, without a GPU
        "is_available": _returns(True),
        # makes torch run work that it otherwise defers until the first use of a GPU
        "is_initialized": _returns(True),
        "is_bf16_supported": _returns(True),
        "is_current_stream_capturing": _returns(False),
        # one device for each process that the launcher started on this machine
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "current_device": _returns(0),
        "get_device_properties": _returns(properties),
        "get_device_capability": _returns(COMPUTE_CAPABILITY),
        "get_device_name": _returns("cpu"),
        "Stream": Stream,
        "Event": Event,
        "current_stream": _returns(stream),
        "default_stream": _returns(stream),
        "stream": _returns(contextlib.nullcontext()),
        "device": _returns(contextlib.nullcontext()),
        "memory_stats": lambda *args, **kwargs: collections.defaultdict(int),
        "mem_get_info": _returns((memory, memory)),
        **{name: _returns() for name in nothing.split()},
        **{name: _returns(0) for name in sizes.split()},
    }


def _accelerator_values() -> dict[str, Any]:
    """Report no accelerator, so that torch's own code (the data loader) does not use one."""
    return {
        "is_available": _returns(False),
        "device_count": _returns(0),
        "current_accelerator": _returns(None),
        "current_device_index": _returns(0),
        **{name: _returns() for name in ("synchronize", "empty_cache", "set_device_index")},
    }


def cuda_patches() -> list[Patch]:
    """Return the patches of ``torch.cuda`` and ``torch.accelerator``."""
    return [
        *(Patch(torch.cuda, name, value) for name, value in _cuda_values().items()),
        *(Patch(torch.accelerator, name, value) for name, value in _accelerator_values().items()),
    ]
