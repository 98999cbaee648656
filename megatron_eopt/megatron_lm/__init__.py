"""Megatron-LM's trainer with our optimizers: names that it publishes and uses are rebound to ours.

``megatron.core`` and ``megatron.training`` have no hook for optimizers; modules import what builds
them by name. So these names are replaced, wherever Megatron's modules hold them, and put back
afterwards. ``python -m megatron_eopt.launch`` does this for a script that knows nothing of it.
"""

import argparse
from contextlib import ExitStack

from megatron_eopt import cpu
from megatron_eopt.arguments import add_arguments as _extend_parser
from megatron_eopt.megatron_lm import stats
from megatron_eopt.megatron_lm.help import with_printable_help
from megatron_eopt.megatron_lm.names import rebindings
from megatron_eopt.megatron_lm.rebinding import Exchange

__all__ = ["add_arguments", "install", "installed", "is_installed", "uninstall"]

_EXCHANGE = Exchange()


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to the trainer's parser and return it: an ``extra_args_provider``.

    On the CPU back end, flags that were not given get defaults that work there.
    """
    if cpu.is_enabled():
        cpu.set_defaults(parser)
    return with_printable_help(_extend_parser(parser))


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
        _EXCHANGE.apply(rebindings())
        undo.callback(uninstall)
    return undo


installed = install
"""For ``with installed():``."""


def is_installed() -> bool:
    """Return whether :func:`install` is in effect."""
    return _EXCHANGE.active


def uninstall() -> None:
    """Put everything back; without :func:`install` it changes nothing."""
    stats.undo()
    _EXCHANGE.undo()
