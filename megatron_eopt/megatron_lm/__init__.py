"""Makes Megatron-LM's trainer use this package's optimizers.

Megatron has no hook for optimizers, so :func:`install` replaces the functions that build them in
every Megatron module that imported them, and :func:`uninstall` restores them. ``python -m
megatron_eopt.launch`` does this for an unmodified script. Whoever adapts it to another
trainer reads of other rooms only the functions that are put in place of the trainer's.
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
"""Pairs of Megatron's object and its replacement."""


def install() -> ExitStack:
    """Make Megatron's modules build this package's optimizers; a second call changes nothing.

    Names that your own modules imported from Megatron earlier keep Megatron's objects.

    Returns:
        A context manager for an optional ``with`` block, at whose end it calls :func:`uninstall`
        if this call was the one that installed.

    Raises:
        ImportError: If this megatron-core lacks a name to replace. Nothing has been replaced then.
    """
    undo = ExitStack()
    if not is_installed():
        # looked up before anything is replaced, so that a missing name changes nothing
        pairs = [(vars(owner)[name], ours) for owner, name, ours in rebindings()]
        _exchange(pairs)
        _replaced.extend(pairs)
        undo.callback(uninstall)
    return undo


installed = install
"""Alias of :func:`install` that reads well as ``with installed():``."""


def is_installed() -> bool:
    """Return whether :func:`install` is in effect."""
    return bool(_replaced)


def uninstall() -> None:
    """Restore Megatron's own objects; does nothing if they are not replaced."""
    _exchange((ours, original) for original, ours in _replaced)
    _replaced.clear()


def _exchange(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Swap objects in every loaded Megatron module, because many import them by name."""
    # by identity, because modules import the objects under any name
    by_id = {id(old): new for old, new in pairs}
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] != "megatron" or not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in by_id:
                setattr(module, name, by_id[id(value)])
