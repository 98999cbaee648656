"""The rules that say which parameter gets which optimizer, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_eopt.base.errors import ConfigurationError, check_choice
from megatron_eopt.base.names import NO_MUON_ATTRIBUTE
from megatron_eopt.routing.overrides import merge
from megatron_eopt.routing.parameters import ModelParameter
from megatron_eopt.settings.registry import (
    Overrides,
    is_our_rule,
    optimizer_names,
    state_layout_of,
)
from megatron_eopt.settings.settings import Settings


@dataclass(frozen=True)
class Route:
    """Where one parameter goes."""

    parameter: ModelParameter
    optimizer: str  # name of its optimizer
    values: Mapping[str, Any]  # settings of its group that differ from the run's
    labels: tuple[str, ...]  # the overrides that these settings come from
    why: str  # why it goes there


def route_all(
    parameters: Sequence[ModelParameter], overrides: Overrides, settings: Settings
) -> list[Route]:
    """Return the route of every parameter, in their order.

    Overrides that disagree, or name an optimizer that is unknown or cannot take a parameter, are a
    ConfigurationError.
    """
    defaults = settings.default_overrides
    routes = [_route(parameter, overrides, defaults, settings) for parameter in parameters]
    rates = {name: settings.own_rates(name) for name in {route.optimizer for route in routes}}
    return [replace(r, values={**rates[r.optimizer], **r.values}) for r in routes]


def _route(
    parameter: ModelParameter, overrides: Overrides, defaults: Overrides, settings: Settings
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
    parameter: ModelParameter, defaults: Overrides, settings: Settings
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a parameter's settings where no override of the user's matches, and why."""
    excluded = parameter.is_excluded and not settings.takes_excluded
    reason = f"{NO_MUON_ATTRIBUTE}=False" if excluded else parameter.why_not_matrix
    rule = next(filter(is_our_rule, defaults), None)
    values, labels = merge(parameter, {k: v for k, v in defaults.items() if k is not rule})
    if rule is not None and reason:
        # the parameter knows more than the key's predicate can see
        return {**values, **defaults[rule]}, (reason, *labels)
    if settings.router_to_scalar and parameter.is_router and defaults:
        return {**values, "optimizer": settings.scalar}, ("router", *labels)
    return values, labels


def _check_wish(parameter: ModelParameter, optimizer: str) -> None:
    check_choice("config_overrides[...]['optimizer']", optimizer, optimizer_names())
    if state_layout_of(optimizer) == "element_wise":
        return
    if not parameter.has_matrix_shape:
        rule = f"takes matrices only, and {parameter.name} has the shape {parameter.shape}"
        way_out = "Let the key match 2-D parameters only, or set param.eopt_split of a stack"
        raise ConfigurationError("config_overrides[...]['optimizer']", optimizer, rule, way_out)
