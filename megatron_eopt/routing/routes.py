"""Rules that decide which optimizer each parameter gets: the user's overrides, then defaults.

An override maps a ``ParamKey`` to settings for the parameters that the key matches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_choice,
    check_number,
)
from megatron_eopt.base.names import NO_MUON_ATTRIBUTE
from megatron_eopt.base.upstream import found
from megatron_eopt.routing.parameters import ModelParameter
from megatron_eopt.settings import registry
from megatron_eopt.settings.settings import Settings

_NOT_NEGATIVE = frozenset(
    {"max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult", "lr", "weight_decay"}
)

USUAL_VALUES = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
"""Default values in megatron-core's parameter groups."""

_NO_SETTINGS = frozenset({"params", "is_expert_parallel", "default_config"})
"""Keys of a parameter group that are not settings."""


def describe(key: ParamKey) -> str:
    """Return a readable description of a key, the same in every process."""
    parts = []
    for kind in ("name", "attr", "predicate", "with_name_predicate"):
        given = getattr(key, kind)
        items = given if isinstance(given, tuple) else (given,)
        parts += [f"{kind}={getattr(item, 'name', item)}" for item in items]
    return ", ".join(sorted(parts)) or "matches nothing"


def check_overrides(overrides: registry.Overrides) -> None:
    """Raise a ConfigurationError or ConfigurationTypeError for an invalid key or value."""
    for key, values in overrides.items():
        if not isinstance(key, ParamKey):
            rule, way_out = "keys must be ParamKeys", "Wrap the name in ParamKey"
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


def merge(
    parameter: ModelParameter, overrides: registry.Overrides
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings of all overrides that match ``parameter``, and the keys' descriptions.

    Raises:
        ConfigurationError: If two overrides give a setting different values.
    """
    said: dict[str, tuple[Any, str]] = {}  # each setting's value, and the label of its key
    labels: set[str] = set()
    for key, override in overrides.items():
        if not key.matches(parameter.param, parameter.matched_name):
            continue
        label = describe(key)
        labels.add(label)
        for name, value in override.items():
            other, by = said.setdefault(name, (value, label))
            if other != value:
                rule = f"{parameter.matched_name} matches {by!r}, which sets {other!r}, and "
                rule += f"{label!r}, which sets {value!r}"
                way_out = "Give both the same value, or let the keys match different parameters"
                raise ConfigurationError(f"config_overrides[...][{name!r}]", value, rule, way_out)
    return {name: value for name, (value, _) in said.items()}, tuple(sorted(labels))


def unmatched(parameters: Sequence[ModelParameter], overrides: registry.Overrides) -> list[str]:
    """Return descriptions of the keys that match no parameter on this rank."""
    return [
        describe(key)
        for key in overrides
        if not any(key.matches(item.param, item.matched_name) for item in parameters)
    ]


def with_callers_grouping(
    settings: Settings, model_chunks: Sequence[torch.nn.Module], overrides: registry.Overrides
) -> registry.Overrides:
    """Return overrides that reproduce the groups of a replaced ``_get_param_groups``.

    Some trainers (ms-swift) replace ``megatron.core.optimizer._get_param_groups`` to give parts of
    a model their own learning rates. The settings of each group become one override, and routing
    still chooses the optimizers. With megatron-core's own function, returns ``overrides``.
    """
    grouping = found("_get_param_groups")
    home = getattr(grouping, "__globals__", {}).get("__name__", "")
    if grouping is None or home.startswith("megatron.core."):
        return overrides
    usual = {**USUAL_VALUES, "max_lr": settings.lr, "min_lr": settings.min_lr}
    result = {}
    for group in grouping(model_chunks, settings.config, overrides):
        values = {
            name: value
            for name, value in group.items()
            if name not in _NO_SETTINGS and not (name in usual and value == usual[name])
        }
        if values:
            result[_key(values, group["params"])] = values
    return result


def _key(values: Mapping[str, Any], params: Sequence[torch.Tensor]) -> ParamKey:
    """Return a key that matches exactly ``params``; its name is the same on every rank."""
    known = {id(param) for param in params}
    name = ", ".join(f"{key}={value}" for key, value in sorted(values.items()))
    label = f"the caller's group with {name}"
    predicate = ParamWithNamePredicate(name=label, fn=lambda param, _: id(param) in known)
    return ParamKey(with_name_predicate=predicate)


@dataclass(frozen=True)
class Route:
    """The optimizer and settings of one parameter."""

    parameter: ModelParameter
    optimizer: str  # name of its optimizer
    values: Mapping[str, Any]  # settings of its group that differ from the run's
    labels: tuple[str, ...]  # descriptions of the overrides that these settings come from
    why: str  # the reason, as the routing table shows it


def route_all(
    parameters: Sequence[ModelParameter], overrides: registry.Overrides, settings: Settings
) -> list[Route]:
    """Return the route of every parameter, in the same order.

    Raises:
        ConfigurationError: If overrides disagree, name an unknown or unsuitable optimizer, or let a
            learning rate rise.
    """
    defaults = settings.default_overrides
    routes = [_route(parameter, overrides, defaults, settings) for parameter in parameters]
    rates = {name: settings.own_rates(name) for name in {route.optimizer for route in routes}}
    routes = [replace(r, values={**rates[r.optimizer], **r.values}) for r in routes]
    for route in routes:
        _check_rates(route, settings)
    return routes


def _check_rates(route: Route, settings: Settings) -> None:
    peak = route.values.get("max_lr", settings.lr)
    least = route.values.get("min_lr", settings.min_lr)
    if None not in (peak, least) and peak < least:
        rule = f"is below min_lr={least:g} of {route.parameter.name}, so its rate would rise"
        way_out = "Give the override a min_lr that is at most its max_lr"
        raise ConfigurationError("config_overrides[...]['max_lr']", peak, rule, way_out)


def _route(
    parameter: ModelParameter,
    overrides: registry.Overrides,
    defaults: registry.Overrides,
    settings: Settings,
) -> Route:
    wanted, labels = merge(parameter, overrides)
    default, reasons = _by_default(parameter, defaults, settings)
    values = {**default, **wanted}
    optimizer = values.pop("optimizer", settings.optimizer)
    if "optimizer" in wanted:
        why = "config_overrides: " + "; ".join(labels)
        _check_wish(parameter, optimizer)
    elif optimizer != settings.optimizer or not defaults:
        why = "; ".join(reasons) or "every parameter"
    else:
        why = "matrix"
    return Route(parameter, optimizer, values, labels, why)


def _by_default(
    parameter: ModelParameter, defaults: registry.Overrides, settings: Settings
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a parameter's settings without the user's overrides, and the reasons for them."""
    excluded = parameter.is_excluded and not settings.takes_excluded
    reason = f"{NO_MUON_ATTRIBUTE}=False" if excluded else parameter.why_not_matrix
    rule = next(filter(registry.is_our_rule, defaults), None)
    values, labels = merge(parameter, {k: v for k, v in defaults.items() if k is not rule})
    if rule is not None and reason:
        # the parameter's reason also covers cases that the rule's predicate cannot recognize
        return {**values, **defaults[rule]}, (reason, *labels)
    if settings.router_to_scalar and parameter.is_router and defaults:
        return {**values, "optimizer": settings.scalar}, ("router", *labels)
    return values, labels


def _check_wish(parameter: ModelParameter, optimizer: str) -> None:
    check_choice("config_overrides[...]['optimizer']", optimizer, registry.optimizer_names())
    if registry.state_layout_of(optimizer) == "element_wise":
        return
    if not parameter.has_matrix_shape:
        rule = f"updates only matrices, but {parameter.name} has the shape {parameter.shape}"
        way_out = "Let the key match only 2-D parameters, or set param.eopt_split on 3-D stacks"
        raise ConfigurationError("config_overrides[...]['optimizer']", optimizer, rule, way_out)
