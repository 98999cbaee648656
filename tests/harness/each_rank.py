"""Tests whose body runs on every rank."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from tests.harness import run_ranks

type Test = Callable[..., None]


def on_ranks(world_size: int | str, **options: Any) -> Callable[[Test], Test]:
    """Let so many ranks call a test, with its parameters; options are those of :func:`run_ranks`.

    Their number may be one of the test's parameters, which is named. Only marks may stand above
    this decorator, since ranks look for the test right below it.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def start(**arguments: Any) -> None:
            size = arguments[world_size] if isinstance(world_size, str) else world_size
            run_ranks(size, _call, test.__module__, test.__name__, arguments, **options)

        return start

    return decorate


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)
