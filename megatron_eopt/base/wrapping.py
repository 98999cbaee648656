"""Wraps functions in others that receive the original as their first argument."""

import functools
from collections.abc import Callable
from typing import Any

type Function = Callable[..., Any]


def around(body: Function) -> Callable[[Function], Function]:
    """Turn ``body(original, *args, **kwargs)`` into a decorator for the original function."""

    def wrapper(original: Function) -> Function:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            return body(original, *args, **kwargs)

        return run

    return wrapper
