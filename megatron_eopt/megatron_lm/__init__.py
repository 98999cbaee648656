"""Megatron-LM's trainer with our optimizers: names that it publishes and uses are rebound to ours.

``megatron.core`` and ``megatron.training`` have no hook for optimizers; modules import what builds
them by name. So these names are replaced, wherever Megatron's modules hold them, and put back
afterwards. ``python -m megatron_eopt.launch`` does this for a script that knows nothing of it.
"""

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from megatron_eopt.megatron_lm.names import rebindings
from megatron_eopt.megatron_lm.trainer import add_arguments

__all__ = ["add_arguments", "install", "installed", "is_installed", "uninstall"]

_replaced: list[tuple[Any, Any]] = []
"""Megatron's objects, and those that took their places."""


def install() -> ExitStack:
    """Let Megatron's modules build their optimizers with us; a second call changes nothing.

    Names that other modules imported from Megatron before keep Megatron's objects.

    Returns:
        A context manager that does :func:`uninstall` at the end of a ``with`` block, if this call
        was the one that installed. Outside of ``with`` it does nothing.

    Raises:
        ImportError: If this megatron-core lacks a name that would be replaced, or the name is not
            what is needed. Nothing has been replaced then.
    """
    undo = ExitStack()
    if not is_installed():
        pairs = [(vars(owner)[name], ours) for owner, name, ours in rebindings()]
        _exchange(pairs)
        _replaced.extend(pairs)
        undo.callback(uninstall)
    return undo


installed = install
"""For ``with installed():``."""


def is_installed() -> bool:
    """Return whether :func:`install` is in effect."""
    return bool(_replaced)


def uninstall() -> None:
    """Put everything back; without :func:`install` it changes nothing."""
    _exchange((ours, original) for original, ours in _replaced)
    _replaced.clear()


def _exchange(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Swap objects in every module of Megatron that holds them, under whatever name.

    Modules import functions and classes from each other by name, so that one object is bound in
    many places, and more are bound when a module is imported later.
    """
    by_id = {id(old): new for old, new in pairs}
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] != "megatron" or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
