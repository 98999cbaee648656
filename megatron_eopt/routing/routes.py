"""The rules that say which parameter gets which optimizer, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megatron_eopt.base.errors import ConfigurationError, check_choice
from megatron_eopt.routing.overrides import Overrides, Settings, merge
from megatron_eopt.routing.parameters import ModelParameter


def is_nonlinear_or_embedding(param: torch.Tensor) -> bool:
    """Whether a parameter's own attributes say that it is no matrix for an emerging optimizer."""
    return bool(getattr(param, "is_embedding_or_output_parameter", False)) or param.dim() != 2


NOT_A_MATRIX = ParamKey(
    predicate=ParamPredicate(name="nonlinear_or_embedding", fn=is_nonlinear_or_embedding)
)
"""Key under which an optimizer says where parameters go that are no matrices.

Routing knows more than the predicate can see (learned position embeddings, ``use_muon=False``), so
it asks :attr:`ModelParameter.why_not_matrix` for parameters under this key.
"""


@dataclass(frozen=True)
class Rules:
    """How one configuration routes parameters.

    Attributes:
        main: The optimizer that takes every parameter no rule sends elsewhere.
        scalar: The optimizer for what ``main`` does not take.
        defaults: Overrides that come with ``main``; the user's override them.
        router_to_scalar: Whether the weights of mixture-of-experts routers go to ``scalar``.
        names: Every optimizer a user may name.
        matrices_only: Those of them that take 2-D parameters only.
        main_lr: ``max_lr`` and ``min_lr`` of ``main`` where they differ from the run's.
    """

    main: str
    scalar: str
    defaults: Overrides = field(default_factory=dict)
    router_to_scalar: bool = False
    names: tuple[str, ...] = ()
    matrices_only: frozenset[str] = frozenset()
    main_lr: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """Where one parameter goes.

    Attributes:
        parameter: The parameter.
        optimizer: Name of its optimizer.
        values: Settings of its group that differ from the run's.
        labels: The overrides that these settings come from.
        why: Why it goes there.
    """

    parameter: ModelParameter
    optimizer: str
    values: Mapping[str, Any]
    labels: tuple[str, ...]
    why: str


def route_all(
    parameters: Sequence[ModelParameter], overrides: Overrides, rules: Rules
) -> list[Route]:
    """Return the route of every parameter, in their order.

    Raises:
        ConfigurationError: If an override names an unknown optimizer, sends a parameter to one that
            cannot take it, or disagrees with another override.
    """
    return [_route(parameter, overrides, rules) for parameter in parameters]


def _route(parameter: ModelParameter, overrides: Overrides, rules: Rules) -> Route:
    wanted = merge(parameter, overrides)
    default = _default_settings(parameter, rules)
    values = {**default.values, **wanted.values}
    optimizer = values.pop("optimizer", rules.main)
    if "optimizer" in wanted.values:
        why = "config_overrides: " + "; ".join(wanted.labels)
        _check_wish(parameter, optimizer, rules)
    elif optimizer != rules.main or not rules.defaults:
        why = "; ".join(default.labels) or "every parameter"
    else:
        why = "matrix"
    if optimizer == rules.main:
        values = {**rules.main_lr, **values}
    return Route(parameter, optimizer, values, wanted.labels, why)


def _default_settings(parameter: ModelParameter, rules: Rules) -> Settings:
    reason = parameter.why_not_matrix
    others = {key: value for key, value in rules.defaults.items() if key != NOT_A_MATRIX}
    merged = merge(parameter, others)
    if NOT_A_MATRIX in rules.defaults and reason:
        values = {**merged.values, **rules.defaults[NOT_A_MATRIX]}
        return Settings(values, (reason, *merged.labels))
    if rules.router_to_scalar and parameter.is_router and rules.defaults:
        return Settings({**merged.values, "optimizer": rules.scalar}, ("router", *merged.labels))
    return merged


def _check_wish(parameter: ModelParameter, optimizer: object, rules: Rules) -> None:
    check_choice("config_overrides[...]['optimizer']", optimizer, rules.names)
    if optimizer in rules.matrices_only and not parameter.has_matrix_shape:
        raise ConfigurationError(
            "config_overrides[...]['optimizer']",
            optimizer,
            f"takes matrices only, and {parameter.name} has the shape {parameter.shape}",
            "Let the key match 2-D parameters only",
        )
