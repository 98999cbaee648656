"""Settings that a parameter group has of its own must be such as the optimizer's."""

import numbers
from typing import Any

import torch

from megatron_eopt.base.errors import ConfigurationTypeError, check_number, check_switch

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
