"""Megatron-LM's trainer with our optimizers: names that it imported are rebound to ours.

``megatron.training`` has no hook for optimizers. It imports what builds them by name, so those
names are replaced in its module and put back afterwards.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_eopt import cpu
from megatron_eopt.arguments import add_arguments as _extend_parser
from megatron_eopt.arguments import config_from_args
from megatron_eopt.assembly.factory import get_megatron_optimizer
from megatron_eopt.base.versions import check_megatron

__all__ = ["add_arguments", "install", "installed", "uninstall"]

_originals: list[tuple[Any, str, Any]] = []


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to the trainer's parser and return it: an ``extra_args_provider``.

    On the CPU back end, flags that were not given get defaults that work there.
    """
    if cpu.is_enabled():
        cpu.set_defaults(parser)
    return _extend_parser(parser)


def install() -> None:
    """Let ``megatron.training`` build its optimizers with us; a second call changes nothing.

    Raises:
        ConfigurationError: If this version of megatron-core has not been tested.
    """
    if _originals:
        return
    check_megatron()
    from megatron.core.datasets import utils as dataset_helpers
    from megatron.training import training

    _rebind(training, "get_megatron_optimizer", get_megatron_optimizer)
    _rebind(training, "get_megatron_optimizer_config", config_from_args)
    if not Path(dataset_helpers.__file__).with_name("Makefile").exists():
        # the wheel brings the helpers compiled, and nothing to compile them with
        _rebind(dataset_helpers, "compile_helpers", lambda: None)


def uninstall() -> None:
    """Put everything back; without :func:`install` it changes nothing."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


@contextmanager
def installed() -> Iterator[None]:
    """Do :func:`install` inside this context and :func:`uninstall` after it."""
    install()
    try:
        yield
    finally:
        uninstall()


def _rebind(owner: Any, name: str, replacement: Any) -> None:
    _originals.append((owner, name, getattr(owner, name)))
    setattr(owner, name, replacement)
