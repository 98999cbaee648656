"""Arithmetic that torch's function modes have nothing to do with."""

from collections.abc import Callable
from functools import wraps

import torch


def without_modes[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Let calls of torch inside ``function`` pass by the function modes of the running thread.

    Each mode, such as the one that reads ``cuda`` as ``cpu``, is asked about every call, be it as
    small as ``tensor.shape``: a few microseconds, thousands of times in a step. Whoever only
    computes on tensors that are there, and names no device but theirs, can do without.
    """

    @wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return plain
