"""Megatron-LM's trainer with our optimizers: names that it imported are rebound to ours.

``megatron.training`` has no hook for optimizers. It imports what builds them by name, so those
names are replaced in its module and put back afterwards.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_eopt import cpu
from megatron_eopt.arguments import add_arguments as _extend_parser
from megatron_eopt.arguments import config_from_args
from megatron_eopt.assembly.factory import get_megatron_optimizer
from megatron_eopt.base.versions import check_megatron, dataset_helpers_to_skip

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
    from megatron.training import training

    _rebind(training, "get_megatron_optimizer", get_megatron_optimizer)
    _rebind(training, "get_megatron_optimizer_config", config_from_args)
    _rebind(
        training, "get_megatron_ddp_config", _sharding_ddp_config(training.get_megatron_ddp_config)
    )
    _rebind(
        training,
        "wrap_model_chunks_with_ddp",
        _in_the_usual_layout(training.wrap_model_chunks_with_ddp),
    )
    helpers = dataset_helpers_to_skip()
    if helpers is not None:
        _rebind(helpers, "compile_helpers", lambda: None)


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


def _sharding_ddp_config(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let Megatron's DDP reduce-scatter gradients for layer-wise optimizers as it does for Adam.

    The trainer's argument check has turned ``use_distributed_optimizer`` off for them.
    """

    @functools.wraps(original)
    def get_megatron_ddp_config(args: Any) -> Any:
        config = original(args)
        if getattr(args, "use_layer_wise_distributed_optimizer", False):
            config = dataclasses.replace(config, use_distributed_optimizer=True)
        return config

    return get_megatron_ddp_config


def _in_the_usual_layout(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lay parameters out without padding, whatever the optimizer."""

    @functools.wraps(original)
    def wrap_model_chunks_with_ddp(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "use_layer_wise_distributed_optimizer": False})

    return wrap_model_chunks_with_ddp


def _rebind(owner: Any, name: str, replacement: Any) -> None:
    _originals.append((owner, name, getattr(owner, name)))
    setattr(owner, name, replacement)
