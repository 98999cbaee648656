"""Child processes of the trainer that need nothing of the training script."""

import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


class _SealedQueue:
    """A manager's queue, whose process need not know the types of what it holds: pickles."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, item: object, *args: Any, **kwargs: Any) -> None:
        self._queue.put(pickle.dumps(item), *args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        return pickle.loads(self._queue.get(*args, **kwargs))

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return bool(self._queue.empty())


@contextmanager
def _without_main() -> Iterator[None]:
    """Give processes that are started afresh in this block no main module to import."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def without_the_script(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``get_write_results_queue`` start its process without importing Megatron or torch there.

    The first save of a run starts a process that holds a queue. Multiprocessing has it import the
    main module first, which is all of Megatron, on every rank, for some ten seconds and most of a
    gigabyte; and the first item of the queue has it import torch.
    """

    @functools.wraps(original)
    def get_write_results_queue(*args: Any, **kwargs: Any) -> _SealedQueue:
        with _without_main():
            return _SealedQueue(original(*args, **kwargs))

    return get_write_results_queue
