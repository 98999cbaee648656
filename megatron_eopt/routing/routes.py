"""Rules that decide which optimizer each parameter gets: the user's overrides, then defaults.

An override maps a ``ParamKey`` to settings for the parameters that the key matches.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_choice,
    check_number,
)
from megatron_eopt.base.names import NO_MUON_ATTRIBUTE
from megatron_eopt.config import registry
from megatron_eopt.config.fields import FieldType
from megatron_eopt.config.keys import PARTS, ParamKey, ParamWithNamePredicate, each, is_key
from megatron_eopt.config.settings import Settings
from megatron_eopt.config.values import read_value
from megatron_eopt.routing.parameters import ModelParameter
from megatron_eopt.routing.plain_names import plain_pattern

_NOT_NEGATIVE = frozenset(
    {"max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult", "lr", "weight_decay"}
)

USUAL_VALUES = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
"""Default values in megatron-core's parameter groups."""

NO_SETTINGS = frozenset({"params", "is_expert_parallel", "default_config"})
"""Keys of a parameter group that are not settings."""

_OF_MEGATRON = NO_SETTINGS | {"is_decoupled_lr", "group_id"}
"""Keys of a parameter group that only Megatron or this package sets."""

_OF_SCHEDULER = {
    "min_lr": "only Megatron's scheduler reads it, and your training loop has its own",
    "start_wd": "only Megatron's scheduler changes weight decay",
    "end_wd": "only Megatron's scheduler changes weight decay",
}
"""Settings that ``build_optimizer`` cannot use, and why."""

_SAME = {"lr": ("max_lr",), "weight_decay": ("start_wd", "end_wd")}
"""What Megatron's scheduler reads in place of values that it writes to groups in each step."""


@lru_cache(maxsize=1024)
def describe(key: ParamKey) -> str:
    """Return a readable description of a key, the same in every process."""
    parts = []
    for kind in PARTS:
        items = each(getattr(key, kind))
        parts += [f"{kind}={getattr(item, 'name', item)}" for item in items]
    return ", ".join(sorted(parts)) or "matches nothing"


def read_overrides(overrides: Any, *, own_loop: bool = False) -> registry.Overrides:
    """Return overrides with values of the declared types, and with what the scheduler reads.

    Args:
        overrides: Settings by ``ParamKey``; they are not modified.
        own_loop: Whether the caller's training loop steps, without Megatron's scheduler.

    Raises:
        ConfigurationError: If a key or value is invalid, or the training loop cannot use it.
        ConfigurationTypeError: If one has a wrong type.
    """
    if not isinstance(overrides, Mapping):
        rule, hint = "must map ParamKeys to settings", "Pass a dictionary"
        raise ConfigurationTypeError("config_overrides", overrides, rule, hint)
    return {key: _read(key, values, own_loop=own_loop) for key, values in overrides.items()}


def _read(key: Any, values: Any, *, own_loop: bool) -> dict[str, Any]:
    if not is_key(key):
        rule, hint = "keys must be ParamKeys", "Wrap the name in ParamKey"
        raise ConfigurationTypeError("config_overrides", key, rule, hint)
    for kind in ("name", "attr"):
        read_value(f"ParamKey({kind})", getattr(key, kind), FieldType(tuple[str, ...]))
    where = f"config_overrides[{describe(key)}]"
    if not isinstance(values, Mapping):
        rule, hint = "must map names of settings to values", "Pass a dictionary"
        raise ConfigurationTypeError(where, values, rule, hint)
    result = {name: _read_setting(f"{where}[{name!r}]", name, v) for name, v in values.items()}
    if own_loop and result.get("start_wd") != result.get("end_wd"):
        _refuse_scheduled(where, result)
    if own_loop and "min_lr" in result:
        _refuse_scheduled(where, {"min_lr": result["min_lr"]})
    for name, others in _SAME.items():
        for other in others if name in result else ():
            if result.setdefault(other, result[name]) != result[name]:
                rule = f"contradicts {other}={result[other]!r}, which has the same meaning here"
                hint = "Give only one of them"
                raise ConfigurationError(f"{where}[{name!r}]", result[name], rule, hint)
    return result


def _read_setting(argument: str, name: object, value: Any) -> Any:
    if name in _OF_MEGATRON:
        rule, hint = "belongs to Megatron, not to a parameter's settings", "Remove it"
        raise ConfigurationError(argument, value, rule, hint)
    value = value.item() if isinstance(value, np.generic) else value
    if name == "optimizer":
        return read_value(argument, value, FieldType(str))
    if name in _NOT_NEGATIVE:
        value = read_value(argument, value, FieldType(float))
        check_number(argument, value, at_least=0.0)
    elif isinstance(value, float):
        check_number(argument, value)
    try:
        hash(value)
    except TypeError as error:
        rule, hint = "must be hashable", "Use a tuple, not a list"
        raise ConfigurationTypeError(argument, value, rule, hint) from error
    return value


def _refuse_scheduled(where: str, values: Mapping[str, Any]) -> None:
    """Raise a ConfigurationError for a setting that only Megatron's scheduler can use."""
    name = next(name for name in _OF_SCHEDULER if name in values)
    hint = "Set lr or weight_decay, and let your scheduler change it in optimizer.param_groups"
    raise ConfigurationError(f"{where}[{name!r}]", values[name], _OF_SCHEDULER[name], hint)


def _merge(
    parameter: ModelParameter, overrides: registry.Overrides
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings of all overrides that match ``parameter``, and the keys' descriptions.

    Raises:
        ConfigurationError: If two overrides give a setting different values.
    """
    if not overrides:
        return {}, ()
    said: dict[str, tuple[Any, str]] = {}  # each setting's value, and the label of its key
    labels: set[str] = set()
    for key, override in overrides.items():
        if not _matches(key, parameter):
            continue
        label = describe(key)
        labels.add(label)
        for name, value in override.items():
            other, by = said.setdefault(name, (value, label))
            if other != value:
                whose = parameter.matched_names[0]
                rule = f"{whose} matches {by!r}, which sets {other!r}, and "
                rule += f"{label!r}, which sets {value!r}"
                hint = "Give both the same value, or let the keys match different parameters"
                raise ConfigurationError(f"config_overrides[...][{name!r}]", value, rule, hint)
    return {name: value for name, (value, _) in said.items()}, tuple(sorted(labels))


def unmatched(parameters: Sequence[ModelParameter], keys: Iterable[ParamKey]) -> list[str]:
    """Return descriptions of the keys that match no parameter on this rank."""
    return [describe(key) for key in keys if not any(_matches(key, item) for item in parameters)]


def _matches(key: ParamKey, parameter: ModelParameter) -> bool:
    """Return whether a key matches a parameter, however the model was and is wrapped."""
    for name in parameter.matched_names:
        if key.matches(parameter.param, name):
            return True
    plain = [plain_pattern(item, has_module=parameter.of_own_module) for item in each(key.name)]
    return any(fnmatch(parameter.matched_names[0], item) for item in plain)


def overrides_of(
    groups: Iterable[tuple[Iterable[tuple[str, Any]], Sequence[torch.Tensor]]],
) -> registry.Overrides:
    """Return overrides that give the parameters of groups exactly the settings of these groups.

    Keys have the same names on every rank.
    """
    members: dict[tuple[tuple[str, Any], ...], list[torch.Tensor]] = {}
    for values, params in groups:
        members.setdefault(tuple(sorted(values)), []).extend(params)
    return {_key(dict(v), params): dict(v) for v, params in members.items() if v}


def _key(values: Mapping[str, Any], params: Sequence[torch.Tensor]) -> ParamKey:
    """Return a key that matches exactly ``params``."""
    ids = {id(param) for param in params}
    name = ", ".join(f"{key}={value}" for key, value in values.items())
    label = f"the caller's group with {name}"
    # keys compare predicates by name, so equal groups have equal keys on all ranks
    predicate = ParamWithNamePredicate(name=label, fn=lambda param, _: id(param) in ids)
    return ParamKey(with_name_predicate=predicate)


@dataclass(frozen=True)
class GroupKey:
    """What all parameters of a group share."""

    optimizer: str  # name of their optimizer
    is_expert: bool  # whether they belong to experts
    values: tuple[tuple[str, Any], ...]  # settings that differ from the run's, sorted by name

    @property
    def kind(self) -> str:
        """The identity, unless several groups have the same; see :func:`build_groups`."""
        names = "+".join(name for name, _ in self.values)
        return f"{self.optimizer}/{'expert' if self.is_expert else 'dense'}/{names}"


@dataclass(frozen=True)
class Route:
    """The optimizer and settings of one parameter."""

    parameter: ModelParameter
    optimizer: str  # name of its optimizer
    values: Mapping[str, Any]  # settings of its group that differ from the run's
    labels: tuple[str, ...]  # descriptions of the overrides that these settings come from
    why: str  # the reason, as the routing table shows it

    @cached_property
    def key(self) -> GroupKey:
        """The key of the group that the parameter belongs to."""
        values = tuple(sorted(self.values.items()))
        return GroupKey(self.optimizer, self.parameter.is_expert, values)


def route_all(
    parameters: Sequence[ModelParameter],
    overrides: registry.Overrides,
    settings: Settings,
    standard: registry.Overrides | None = None,
) -> list[Route]:
    """Return the route of every parameter, in the same order.

    Args:
        parameters: The parameters.
        overrides: The caller's settings by ``ParamKey``.
        settings: The run's settings.
        standard: Settings that hold where ``overrides`` has no others.

    Raises:
        ConfigurationError: If overrides disagree, or name an unknown or unsuitable optimizer.
    """
    defaults = _Defaults(settings)
    return [_route(item, overrides, standard or {}, defaults) for item in parameters]


def _multiplied(values: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return settings with ``lr_mult`` applied to rates, because Megatron's scheduler ignores it.

    Raises:
        ConfigurationError: If there is no rate to multiply.
    """
    factor = values.pop("lr_mult", 1.0)
    if factor == 1.0:
        return values
    usual = {"max_lr": settings.config.lr, "min_lr": settings.config.min_lr}
    # a group without rates of its own gets the run's, multiplied
    rates = {name: values.get(name, rate) for name, rate in usual.items()}
    if rates["max_lr"] is None:
        rule = "needs a learning rate to multiply, and the configuration has none"
        hint = "Set max_lr, or lr in the configuration"
        raise ConfigurationError("config_overrides[...]['lr_mult']", factor, rule, hint)
    changed = {name: rate * factor for name, rate in rates.items() if rate is not None}
    return {**values, **changed, **({"lr": changed["max_lr"]} if "lr" in values else {})}


def _route(
    parameter: ModelParameter,
    overrides: registry.Overrides,
    standard: registry.Overrides,
    defaults: "_Defaults",
) -> Route:
    wanted, labels = _merge(parameter, overrides)
    usual, _ = _merge(parameter, standard)
    if "start_wd" in wanted:
        usual.pop("wd_mult", None)  # the weight decay that was asked for, not a part of it
    default, reasons = defaults.of(parameter)
    values = {**default, **usual, **wanted}
    optimizer = values.pop("optimizer", defaults.main)
    if "optimizer" in wanted:
        check_choice("config_overrides[...]['optimizer']", optimizer, registry.optimizer_names())
        why = "config_overrides: " + "; ".join(labels)
    elif optimizer != defaults.main or not defaults.overrides:
        why = "; ".join(reasons) or "every parameter"
    else:
        why = "matrix"
    if defaults.is_of_matrices(optimizer):
        _check_shape(parameter, optimizer)
    values = _multiplied({**defaults.rates_of(optimizer), **values}, defaults.settings)
    return Route(parameter, optimizer, values, labels, why)


class _Defaults:
    """What parameters get without the user's overrides."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.main = settings.optimizer
        self.rates_of = cache(settings.own_rates)
        self.is_of_matrices = cache(registry.steps_matrices)
        self.overrides = settings.default_overrides
        self._rule = next(filter(registry.is_our_rule, self.overrides), None)
        self._others = {k: v for k, v in self.overrides.items() if k is not self._rule}
        self._ignores_use_muon = bool(settings.first_field("ignore_use_muon"))
        to_scalar = {"optimizer": settings.scalar}
        self._of_routers = to_scalar if settings.excludes_routers else None
        self._how = {
            "by_module": settings.recommended or settings.of_dtensors,
            "convolutions": bool(settings.first_field("convolutions")),
        }

    def of(self, parameter: ModelParameter) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return a parameter's settings, and the reasons for them."""
        excluded = parameter.is_excluded and not self._ignores_use_muon
        no_matrix = parameter.why_not_matrix(**self._how)
        reason = f"{NO_MUON_ATTRIBUTE}=False" if excluded else no_matrix
        values, labels = _merge(parameter, self._others)
        if self._rule is not None and reason:
            # the parameter's reason also covers cases that the rule's predicate cannot recognize
            return {**values, **self.overrides[self._rule]}, (reason, *labels)
        if parameter.is_router and self._of_routers is not None:
            return {**values, **self._of_routers}, ("router", *labels)
        return values, labels


def _check_shape(parameter: ModelParameter, optimizer: str) -> None:
    """Raise a ConfigurationError for a parameter that an optimizer of matrices cannot update."""
    if 0 in parameter.shape:
        rule = f"has no elements, so {optimizer} cannot update it"
        hint = "Remove or freeze it, or set param.use_muon = False"
        raise ConfigurationError(parameter.name, parameter.shape, rule, hint)
    if not parameter.has_matrix_shape:
        rule = f"updates only matrices, but {parameter.name} has the shape {parameter.shape}"
        hint = "Let the key match only matrices, or set param.eopt_split to 'whole'"
        raise ConfigurationError("config_overrides[...]['optimizer']", optimizer, rule, hint)
