"""CUDA streams on a CPU, whose work runs as late as a GPU may run it: when another one waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.harness.graphs import READS, Capture, Graph


class LateStream:
    """Stands for ``torch.cuda.Stream``; the host may not read what is launched on it."""

    def __init__(self) -> None:
        self.launched = Graph()
        self.waits = 0  # times that another stream has waited for its work

    def wait_stream(self, other: Any) -> None:
        """Let what ``other`` has launched run now."""
        other.run()

    def run(self) -> None:
        """Do what has been launched."""
        launched, self.launched = self.launched, Graph()
        self.waits += bool(launched.calls)
        launched.replay()


class _MainStream(LateStream):
    """The stream whose work runs when it is launched."""


@contextmanager
def late_streams() -> Iterator[None]:
    """Let ``torch.cuda``'s functions work with :class:`LateStream`."""
    running: list[LateStream] = [_MainStream()]

    @contextmanager
    def stream(one: LateStream) -> Iterator[None]:
        running.append(one)
        with Capture(one.launched, READS):
            yield
        running.pop()

    def current() -> LateStream:
        return running[-1]

    here = mock.patch.object(torch.cuda, "current_stream", current)
    with mock.patch.object(torch.cuda, "stream", stream), here:
        yield
