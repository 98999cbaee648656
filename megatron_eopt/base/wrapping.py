"""Functions that take the places of others, and call these."""

import functools
from collections.abc import Callable
from typing import Any

type Function = Callable[..., Any]


def around(body: Function) -> Callable[[Function], Function]:
    """Let a function, which gets the original one before its arguments, be a wrapper of others.

    What it returns takes an original and returns what stands in for it, by the same name.
    """

    def wrapper(original: Function) -> Function:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            return body(original, *args, **kwargs)

        return run

    return wrapper
