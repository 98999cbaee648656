"""How long blocks take and how many bytes they send, without the host waiting for a GPU."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Meter:
    """Notes when named blocks begin and end; on a GPU in the stream, by events."""

    def __init__(self, device: torch.device | str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self.sent = 0  # bytes that were sent to other ranks

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note one block."""
        begin = self._now()
        yield
        self._spans[name].append((begin, self._now()))

    def seconds(self, name: str) -> float | None:
        """Return how long all blocks of a name took, None if there was none; waits for them."""
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
