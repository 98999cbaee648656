"""Settings of single parameters: every one is used by the optimizer of its group, or refused.

Megatron's scheduler, or the group, has rates and weight decay. Torch optimizers read their defaults
(``momentum``, ``eps``) from each group. All other constructor arguments need an optimizer of their
own, which :func:`own_arguments` finds out.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_eopt.base.errors import ConfigurationError, did_you_mean
from megatron_eopt.base.names import RATES
from megatron_eopt.config.fields import FieldType, constructor_parameters, type_of
from megatron_eopt.config.values import read_value

_OF_THE_RUN = {
    **dict.fromkeys(("split_qkv", "is_qkv_fn", "qkv_split_shapes", "splits"), "param.eopt_split"),
    **dict.fromkeys(("tp_mode", "batched", "pg_collection"), "the configuration"),
    "matrix_buffer_mb": "it in the configuration",
    **dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), "the configuration"),
    "stream_list": "the configuration",
}
"""Constructor arguments that do not belong to single parameters, and where they are set."""


def own_arguments(
    optimizer: str, values: Mapping[str, Any], construct: Callable[..., torch.optim.Optimizer]
) -> dict[str, Any]:
    """Return the settings of a group that only a constructor reads.

    Args:
        optimizer: Name of the group's optimizer.
        values: The group's settings.
        construct: Creates the optimizer over one stand-in parameter, with further arguments.

    Raises:
        ConfigurationError: If a setting is unknown, or its value is not valid.
        ConfigurationTypeError: If a value has a wrong type.
    """
    given = {name: value for name, value in values.items() if name not in RATES}
    if not given:
        return {}
    made = construct()
    cls: type = type(made)
    takes = constructor_parameters(cls)
    for name, value in given.items():
        _check_name(optimizer, name, value, sorted({*takes, *made.defaults} - _OF_THE_RUN.keys()))
        given[name] = read_value(f"config_overrides[...][{name!r}]", value, _type_of(made, name))
    arguments = {name: value for name, value in given.items() if name in takes}
    try:
        construct(**arguments)
    except Exception as error:
        rule = f"{optimizer} raised an error: {error}".rstrip(".")
        hint = "Correct these settings"
        raise ConfigurationError("config_overrides", arguments, rule, hint) from error
    # torch optimizers read what is in their defaults from the group, in every step
    return {name: value for name, value in arguments.items() if name not in made.defaults}


def _check_name(optimizer: str, name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise a ConfigurationError unless parameters of this optimizer may have the setting."""
    argument = f"config_overrides[...][{name!r}]"
    if name in _OF_THE_RUN:
        hint = f"Set {_OF_THE_RUN[name]} instead"
        raise ConfigurationError(argument, value, "cannot be set for some parameters", hint)
    if name not in allowed:
        rule = (
            f"{optimizer}, which updates these parameters, and Megatron's scheduler have no such "
        )
        rule += "setting"
        hint = did_you_mean(
            name,
            [*allowed, *sorted(RATES)],
            f"Use one of {', '.join(allowed)}, or let the key match other parameters",
            cutoff=0.75,
        )
        raise ConfigurationError(argument, value, rule, hint)


def _type_of(made: torch.optim.Optimizer, name: str) -> FieldType:
    """Return the declared type of a constructor's argument, or else that of its default."""
    cls: type = type(made)
    parameter = constructor_parameters(cls).get(name)
    if parameter is not None and parameter.annotation is not parameter.empty:
        return type_of(parameter.annotation)
    default = made.defaults.get(name)
    return FieldType(type(default), optional=default is None)
