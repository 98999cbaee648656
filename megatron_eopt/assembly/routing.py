"""The routing of a configuration and a model, shared by the factory and by printed tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer

from megatron_eopt.assembly.callers_grouping import with_callers_grouping
from megatron_eopt.assembly.checks import check_values
from megatron_eopt.assembly.gathering import gather_groups
from megatron_eopt.assembly.meaning import Meaning, resolve, rules_of
from megatron_eopt.assembly.tags import tag_parameters
from megatron_eopt.matrices import Split
from megatron_eopt.routing.groups import Group
from megatron_eopt.routing.overrides import Overrides, check_overrides
from megatron_eopt.routing.parameters import trainable_parameters
from megatron_eopt.routing.routes import Route, route_all
from megatron_eopt.routing.table import format_table, routing_rows


@dataclass(frozen=True)
class Routing:
    """Where everything goes.

    Attributes:
        routes: This rank's parameters, in model order.
        groups: The groups, the same on every rank apart from their members.
        splits: The logical matrices of fused parameters.
    """

    routes: Sequence[Route]
    groups: Sequence[Group]
    splits: Mapping[torch.nn.Parameter, Split]


def route_model(
    config: Any, meaning: Meaning, model_chunks: Sequence[torch.nn.Module], overrides: Overrides
) -> Routing:
    """Route every trainable parameter; collective over the world.

    Raises:
        ConfigurationError: If an override, a caller's grouping or the routing as a whole cannot be
            honoured.
        ConfigurationTypeError: If an override has the wrong type.
    """
    overrides = with_callers_grouping(config, model_chunks, overrides)
    check_overrides(overrides, config)
    parameters = trainable_parameters(model_chunks)
    routes = route_all(parameters, overrides, rules_of(meaning))
    groups = gather_groups(routes, parameters, overrides, meaning)
    return Routing(routes, groups, tag_parameters(routes, model_chunks, meaning))


def routing_table(
    config: Any, model_chunks: Sequence[torch.nn.Module], overrides: Overrides | None = None
) -> str:
    """Return the table of this rank's parameters that ``--print-optimizer-routing`` logs.

    Args:
        config: As in ``get_megatron_optimizer``.
        model_chunks: The model, wrapped or not.
        overrides: None means megatron-core's standard ones.
    """
    if overrides is None:
        overrides = megatron_optimizer.get_standard_config_overrides(config)
    meaning = resolve(config)
    check_values(config, meaning)
    return format_routing(config, route_model(config, meaning, model_chunks, overrides))


def format_routing(config: Any, routing: Routing) -> str:
    """Return a routing as a table."""
    rows = routing_rows(
        routing.groups, routing.splits, lr=config.lr, weight_decay=config.weight_decay
    )
    return format_table(rows)
