"""The time of some work by kind of operation, from torch's profiler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile, record_function

PRODUCTS, COPIES, ARITHMETIC, WAITING, REST = KINDS = (
    "products",
    "copies",
    "arithmetic",
    "waiting",
    "rest",
)
"""Of matrices; of memory, casts too; entry by entry and norms; for other ranks, sending included;
Python, views, allocations and the profiler itself."""

_OPERATIONS = {
    PRODUCTS: ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear"),
    COPIES: ("copy_", "_to_copy", "to", "clone", "contiguous", "cat", "stack", "_foreach_copy_"),
    REST: (
        *("view", "reshape", "flatten", "unflatten", "as_strided", "expand", "detach", "alias"),
        *("slice", "select", "narrow", "split", "split_with_sizes", "unbind", "chunk"),
        *("t", "transpose", "permute", "unsqueeze", "squeeze", "diagonal", "set_", "resize_"),
        *("empty", "empty_like", "empty_strided", "new_empty", "item", "_local_scalar_dense"),
    ),
}
_KIND = {f"aten::{name}": kind for kind, names in _OPERATIONS.items() for name in names}

_WORK, _WAIT = "profiled work", "wait"


def kind_of(name: str) -> str:
    """Return the kind of an event of the profiler."""
    if name == _WAIT or name.startswith(("c10d::", "gloo:", "nccl:", "record_param_comms")):
        return WAITING
    return _KIND.get(name, ARITHMETIC if name.startswith("aten::") else REST)


def profiled(work: Callable[[], object]) -> dict[str, float]:
    """Return the milliseconds of some work, begun together on all ranks, by kind."""
    with _waiting_seen(), profile(use_kineto=False) as trace:
        if dist.is_initialized():
            dist.barrier()
        with record_function(_WORK):
            work()
    events = trace.function_events
    (whole,) = (event for event in events if event.name == _WORK)
    span = whole.time_range
    times = dict.fromkeys(KINDS, 0.0)
    for event in events:
        # other threads, gloo's, are waited for
        inside = span.start <= event.time_range.start <= span.end
        if inside and event.thread == whole.thread:
            times[kind_of(event.name)] += event.self_cpu_time_total / 1e3
    return times


@contextmanager
def _waiting_seen() -> Iterator[None]:
    """Let the profiler see how long Python waits for collectives."""
    kind: Any = torch.distributed.Work
    wait = kind.wait

    def seen(*args: Any, **kwargs: Any) -> Any:
        with record_function(_WAIT):
            return wait(*args, **kwargs)

    kind.wait = seen
    try:
        yield
    finally:
        kind.wait = wait
