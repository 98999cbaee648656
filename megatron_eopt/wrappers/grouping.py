"""Trainers that group parameters by a function of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_eopt.config.registry import Overrides
from megatron_eopt.config.settings import Settings
from megatron_eopt.megatron_core.upstream import find_upstream
from megatron_eopt.routing.routes import NO_SETTINGS, USUAL_VALUES, overrides_of


def with_callers_grouping(
    settings: Settings, model_chunks: Sequence[torch.nn.Module], overrides: Overrides
) -> Overrides:
    """Return overrides that reproduce the groups of a replaced ``_get_param_groups``.

    Some trainers (ms-swift) replace ``megatron.core.optimizer._get_param_groups`` to give parts of
    a model their own learning rates. The settings of each group become one override, and routing
    still chooses the optimizers. With megatron-core's own function, returns ``overrides``.
    """
    grouping = find_upstream("_get_param_groups")
    home = getattr(grouping, "__globals__", {}).get("__name__", "")
    if grouping is None or home.startswith("megatron.core."):
        return overrides
    # what the function fills in for every group is no setting of the caller's
    usual = {**USUAL_VALUES, "max_lr": settings.config.lr, "min_lr": settings.config.min_lr}

    def differing(group: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in group.items()
            if name not in NO_SETTINGS and not (name in usual and value == usual[name])
        }

    groups = grouping(model_chunks, settings.config, overrides)
    return overrides_of((differing(group).items(), group["params"]) for group in groups)
