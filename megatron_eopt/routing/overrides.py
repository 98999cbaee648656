"""One parameter's settings, merged from every override that matches it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.optimizer.optimizer_config import (
    ParamKey,
)

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError, check_number
from megatron_eopt.routing.parameters import ModelParameter
from megatron_eopt.settings.registry import Overrides
from megatron_eopt.settings.settings import RunSettings

_NOT_NEGATIVE = frozenset(
    {"max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult", "lr", "weight_decay"}
)


@dataclass(frozen=True)
class Merged:
    """What the overrides say about one parameter."""

    values: Mapping[str, Any] = field(default_factory=dict)  # the merged override
    labels: tuple[str, ...] = ()  # descriptions of the keys it was merged from, sorted


def describe(key: ParamKey) -> str:
    """Return a readable description of a key that is the same in every process."""
    parts = []
    for kind in ("name", "attr", "predicate", "with_name_predicate"):
        given = getattr(key, kind)
        items = given if isinstance(given, tuple) else (given,)
        parts += [f"{kind}={getattr(item, 'name', item)}" for item in items]
    return ", ".join(sorted(parts)) or "matches nothing"


def check_overrides(overrides: Overrides, settings: RunSettings) -> None:
    """Raise a ConfigurationError or ConfigurationTypeError for what no parameter group can hold."""
    whole_run = {
        "overlap_param_gather_with_optimizer_step": settings.early_gather,
        "optimizer_cpu_offload": settings.hybrid or settings.offload_fraction > 0,
    }
    for key, values in overrides.items():
        if not isinstance(key, ParamKey):
            rule, way_out = "each key must be a ParamKey", "Wrap the name in ParamKey"
            raise ConfigurationTypeError("config_overrides", key, rule, way_out)
        where = f"config_overrides[{describe(key)}]"
        for name, value in values.items():
            argument = f"{where}[{name!r}]"
            if isinstance(value, float) or name in _NOT_NEGATIVE:
                bounds = {"at_least": 0.0} if name in _NOT_NEGATIVE else {}
                check_number(argument, value, **bounds)
            try:
                hash(value)
            except TypeError as error:
                rule, way_out = "must be hashable", "Use a tuple, not a list"
                raise ConfigurationTypeError(argument, value, rule, way_out) from error
            if name in whole_run and value != whole_run[name]:
                rule = "concerns the whole optimizer, not a group of parameters"
                raise ConfigurationError(argument, value, rule, f"Set {name} in the config")


def merge(parameter: ModelParameter, overrides: Overrides) -> Merged:
    """Return the union of all overrides that match ``parameter``, which may not disagree."""
    said: dict[str, tuple[Any, str]] = {}  # values with the labels of their keys
    labels: set[str] = set()
    for key, override in overrides.items():
        if not key.matches(parameter.param, parameter.matched_name):
            continue
        label = describe(key)
        labels.add(label)
        for name, value in override.items():
            other, by = said.setdefault(name, (value, label))
            if other != value:
                rule = f"{parameter.matched_name} matches {by!r}, which says {other!r}, and "
                rule += f"{label!r}, which says {value!r}"
                way_out = "Let the two keys match different parameters"
                raise ConfigurationError(f"config_overrides[...][{name!r}]", value, rule, way_out)
    values = {name: value for name, (value, _) in said.items()}
    return Merged(values, tuple(sorted(labels)))


def unmatched(parameters: Sequence[ModelParameter], overrides: Overrides) -> list[str]:
    """Return descriptions of the keys that match no parameter of this rank."""
    return [
        describe(key)
        for key in overrides
        if not any(key.matches(item.param, item.matched_name) for item in parameters)
    ]
