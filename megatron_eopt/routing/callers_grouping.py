"""Settings of parameter groups from a function that a caller put in megatron-core's place.

ms-swift, for one, replaces ``megatron.core.optimizer._get_param_groups`` to give parts of a model
learning rates of their own. What its groups say becomes overrides, one for each group; which
optimizer a parameter gets, and what identifies a group, is decided as always.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

from megatron_eopt.base.upstream import found
from megatron_eopt.routing.groups import USUAL_VALUES
from megatron_eopt.settings.registry import Overrides
from megatron_eopt.settings.settings import Settings

_NO_SETTINGS = frozenset({"params", "is_expert_parallel", "default_config"})


def with_callers_grouping(
    settings: Settings, model_chunks: Sequence[torch.nn.Module], overrides: Overrides
) -> Overrides:
    """Return the overrides that a caller's own grouping function, called with these, amounts to.

    They are ``overrides`` where megatron-core's own function is in place.
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
    """Return what matches ``params`` alone, with a name that is the same on every rank."""
    members = {id(param) for param in params}
    name = ", ".join(f"{key}={value}" for key, value in sorted(values.items()))
    label = f"the caller's group with {name}"
    predicate = ParamWithNamePredicate(name=label, fn=lambda param, _: id(param) in members)
    return ParamKey(with_name_predicate=predicate)
