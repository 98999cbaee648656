"""One parameter's settings, merged from every override that matches it."""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.optimizer.optimizer_config import ParamKey

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError, check_number
from megatron_eopt.routing.parameters import ModelParameter

logger = logging.getLogger(__name__)

Overrides = Mapping[ParamKey, Mapping[str, Any]]

_WHOLE_RUN = ("overlap_param_gather_with_optimizer_step", "optimizer_cpu_offload")
"""Fields that hold for the whole optimizer and so cannot differ between parameters."""

_NOT_NEGATIVE = frozenset(
    {"max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult", "lr", "weight_decay"}
)


@dataclass(frozen=True)
class Settings:
    """What the overrides say about one parameter.

    Attributes:
        values: The merged override.
        labels: Descriptions of the keys it was merged from, sorted.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()


def describe(key: ParamKey) -> str:
    """Return a readable description of a key that is the same in every process."""
    parts = []
    for kind in ("name", "attr", "predicate", "with_name_predicate"):
        given = getattr(key, kind)
        items = given if isinstance(given, tuple) else (given,)
        parts += [f"{kind}={getattr(item, 'name', item)}" for item in items]
    return ", ".join(sorted(parts)) or "matches nothing"


def check_overrides(overrides: Overrides, config: object) -> None:
    """Raise if an override holds something that no parameter group can.

    Raises:
        ConfigurationError: For a key ``params``, or a field that concerns the whole optimizer.
        ConfigurationTypeError: For an override that is no mapping, a key that is no ``ParamKey``,
            or a value that cannot be hashed.
    """
    for key, values in overrides.items():
        if not isinstance(key, ParamKey):
            raise ConfigurationTypeError(
                "config_overrides", key, "each key must be a ParamKey", "Wrap the name in ParamKey"
            )
        where = f"config_overrides[{describe(key)}]"
        if not isinstance(values, Mapping):
            raise ConfigurationTypeError(
                where, values, "must be a mapping of group settings", "Give a dict"
            )
        for name, value in values.items():
            if isinstance(value, float) or name in _NOT_NEGATIVE:
                bounds = {"at_least": 0.0} if name in _NOT_NEGATIVE else {}
                check_number(f"{where}[{name!r}]", value, **bounds)
            if name == "params":
                raise ConfigurationError(
                    f"{where}['params']",
                    type(value).__name__,
                    "the parameters of a group follow from the key and cannot be overridden",
                    "Leave 'params' out and name the parameters in the ParamKey",
                )
            if not isinstance(value, Hashable) or not _hashes(value):
                raise ConfigurationTypeError(
                    f"{where}[{name!r}]", value, "must be hashable", "Use a tuple, not a list"
                )
            if name in _WHOLE_RUN and value != getattr(config, name, None):
                raise ConfigurationError(
                    f"{where}[{name!r}]",
                    value,
                    "concerns the whole optimizer, not a group of parameters",
                    f"Set {name} in the config",
                )


def merge(parameter: ModelParameter, overrides: Overrides) -> Settings:
    """Return the union of all overrides that match ``parameter``.

    Raises:
        ConfigurationError: If two of them disagree.
    """
    values: dict[str, Any] = {}
    labels: set[str] = set()
    said_by: dict[str, str] = {}
    for key, override in overrides.items():
        if not key.matches(parameter.param, parameter.name):
            continue
        label = describe(key)
        labels.add(label)
        for name, value in override.items():
            if name in values and values[name] != value:
                raise ConfigurationError(
                    f"config_overrides[...][{name!r}]",
                    value,
                    f"{parameter.name} matches {said_by[name]!r}, which says {values[name]!r}, and "
                    f"{label!r}, which says {value!r}",
                    "Let the two keys match different parameters",
                )
            values[name] = value
            said_by[name] = label
    return Settings(values, tuple(sorted(labels)))


def unmatched(parameters: Sequence[ModelParameter], overrides: Overrides) -> list[str]:
    """Return descriptions of the keys that match no parameter of this rank."""
    return [
        describe(key)
        for key in overrides
        if not any(key.matches(item.param, item.name) for item in parameters)
    ]


def _hashes(value: Hashable) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
