"""Measures how long named blocks take and what they send, without waiting for the GPU."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Meter:
    """Records when named blocks begin and end: CUDA events on a GPU, else the host's clock."""

    def __init__(self, device: torch.device | str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self.sent = 0  # bytes sent to other ranks

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record one block."""
        begin = self._now()
        yield
        self._spans[name].append((begin, self._now()))

    def seconds(self, name: str) -> float | None:
        """Return the total seconds of the blocks of a name, after waiting; None without any."""
        if name not in self._spans:
            return None
        spans = self._spans[name]
        if not self._on_gpu:
            return float(sum(end - begin for begin, end in spans))
        spans[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1000

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
