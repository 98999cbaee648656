"""Split the time of an optimizer step into products, passes, copies and idle time."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from megatron_eopt.base import gpu

_PRODUCTS = re.compile(r"gemm|nvjet|cutlass|xmma|_multiply|symmetric|mm(_|$)|matmul", re.I)
_COPIES = re.compile(r"copy|memcpy|memset", re.I)

type Interval = tuple[str, float, float]
"""Name, begin and end of a kernel, in microseconds."""


def split_of_step(step: Callable[[], object]) -> dict[str, float]:
    """Return the milliseconds of each kind in one call, on a CPU those of torch's operators."""
    on_gpu = gpu.is_there()
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    events: Iterable[Any] = profiler.events() or []
    return split_of((e.name, e.time_range.start, e.time_range.end) for e in events)


def split_of(events: Iterable[Interval]) -> dict[str, float]:
    """Return the milliseconds of each kind of kernel; where kernels overlap, of the first kind."""
    kinds: dict[str, list[tuple[float, float]]] = {"products": [], "passes": [], "copies": []}
    for name, begin, end in events:
        kind = "products" if _PRODUCTS.search(name) else "passes"
        kinds["copies" if kind == "passes" and _COPIES.search(name) else kind].append((begin, end))
    found, taken = {}, list[tuple[float, float]]()
    for kind, spans in kinds.items():
        found[kind] = (_length([*taken, *spans]) - _length(taken)) / 1e3
        taken += spans
    whole = max((end for _, end in taken), default=0.0) - min((b for b, _ in taken), default=0.0)
    return found | {"idle": (whole - _length(taken)) / 1e3}


def _length(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
