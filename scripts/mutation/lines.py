"""Writes which lines of the package a process executes to a file.

This works in all threads and in forked processes. It costs little, because each line is told once
for each file: Python then stops telling it (``sys.monitoring``). It needs nothing but the standard
library, because every process imports it when it starts.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = str(Path(__file__).parents[2]) + os.sep
PACKAGE = "megatron_eopt"
VARIABLE = "MEGATRON_EOPT_LINES"
"""Environment variable that names the file, for processes that this one starts."""

_OURS = f"{ROOT}{PACKAGE}{os.sep}"
_TOOL = 4  # one of the two numbers that Python keeps for no known tool
_EVENTS = sys.monitoring.events
_log: list[int] = []  # the descriptor, which stays the same


def follow(log: str | Path) -> None:
    """Write each line that is executed from now on to this file, once, as ``file:line``."""
    os.environ[VARIABLE] = str(log)
    _clear_caches()
    new = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    if _log:
        # other threads may be writing, so the descriptor is never closed
        os.dup2(new, _log[0], inheritable=False)
        os.close(new)
        sys.monitoring.restart_events()
        return
    _log.append(new)
    sys.monitoring.use_tool_id(_TOOL, __name__)
    sys.monitoring.register_callback(_TOOL, _EVENTS.PY_START, _on_call)
    sys.monitoring.register_callback(_TOOL, _EVENTS.LINE, _on_line)
    sys.monitoring.set_events(_TOOL, _EVENTS.PY_START)


def _on_call(code: CodeType, _: int) -> Any:
    """Ask for the lines of a function of the package."""
    if code.co_filename.startswith(_OURS):
        sys.monitoring.set_local_events(_TOOL, code, _EVENTS.LINE)
    return sys.monitoring.DISABLE


def _on_line(code: CodeType, line: int) -> Any:
    # a process may have closed all files
    with contextlib.suppress(OSError):
        os.write(_log[0], f"{code.co_filename.removeprefix(ROOT)}:{line}\n".encode())
    return sys.monitoring.DISABLE


def _clear_caches() -> None:
    """Let functions with a cache run once more, so that not only their first test executes them.

    Those without a result are left alone: they say something once.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{PACKAGE}."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    result = value.__wrapped__.__annotations__.get("return")
                    if result not in (None, "None"):
                        value.cache_clear()


class Followed:
    """A function that a worker process calls: what it executes belongs to a test."""

    def __init__(self, function: Callable[..., Any], log: str | Path) -> None:
        self.function, self.log = function, log
        self.__qualname__ = getattr(function, "__qualname__", str(function))  # for errors

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        follow(self.log)
        return self.function(*args)
