"""Settings that a parameter group has of its own must be such as the optimizer's."""

import difflib
import logging
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_eopt.base.agreement import is_rank_0
from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_number,
    check_switch,
)

logger = logging.getLogger(__name__)

_DECAY: dict[str, float] = {"at_least": 0, "below": 1}
_NOT_NEGATIVE: dict[str, float] = {"at_least": 0}

_BOUNDS = {
    "betas": _DECAY,
    "momentum": _DECAY,
    "eps": _NOT_NEGATIVE,
    "lr": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
}
"""Bounds of settings that mean the same to all optimizers that have them."""

_OF_SCHEDULES = frozenset({*param_group_identifier_keys, "lr", "weight_decay", "default_config"})
"""Settings that Megatron's scheduler, or its log, reads of any group."""


def check_names(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Raise a ConfigurationError if a group's setting has a misspelled name.

    A name that resembles none is kept, as for a scheduler of the user's own, with a warning.
    """
    known = _OF_SCHEDULES | optimizer.defaults.keys()
    for name in sorted(set(names) - known):
        near = difflib.get_close_matches(name, known, cutoff=0.75)
        reader = f"{type(optimizer).__name__} and Megatron's scheduler read no such setting"
        if near:
            way_out = f"Did you mean {' or '.join(map(repr, near))}?"
            raise ConfigurationError("config_overrides", name, reader, way_out)
        if is_rank_0():
            logger.warning(
                "config_overrides[...][%r]: %s; groups have it all the same", name, reader
            )


def check_group_settings(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a group has a setting of another kind than the optimizer's own, or out of bounds.

    torch checks an optimizer's own settings when it is built, those of groups when they are used.

    Raises:
        ConfigurationTypeError: If a setting is of another kind.
        ConfigurationError: If a number is out of bounds.
    """
    for group in optimizer.param_groups:
        for name, default in optimizer.defaults.items():
            value = group.get(name, default)
            if value is not default:
                _check(f"config_overrides[...][{name!r}]", value, default, _BOUNDS.get(name))


def _check(argument: str, value: Any, default: Any, bounds: dict[str, float] | None) -> None:
    if isinstance(default, bool):
        check_switch(argument, value)
    elif isinstance(default, numbers.Real):
        check_number(argument, value, **(bounds or {}))
    elif isinstance(default, tuple | list) and default:
        if not isinstance(value, tuple | list) or len(value) != len(default):
            rule = f"must be {len(default)} numbers"
            raise ConfigurationTypeError(argument, value, rule, f"Give a tuple such as {default!r}")
        for own, usual in zip(value, default, strict=True):
            _check(argument, own, usual, bounds)
    elif isinstance(default, str) and not isinstance(value, str):
        raise ConfigurationTypeError(argument, value, "must be a name", f"Such as {default!r}")
