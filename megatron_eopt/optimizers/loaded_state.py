"""What a state dict must have to be loaded: torch takes over whatever it finds."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.optimizers.driver import Driver, ParamGroup, State
from megatron_eopt.optimizers.muon_arguments import check_numbers


def check_loaded(
    driver: Driver,
    groups: Sequence[ParamGroup],
    state: State,
    names: Sequence[str],
    loaded: Mapping[str, Any],
) -> None:
    """Raise unless a state dict has what the driver steps with, in the shapes it has.

    A parameter may be without any state, as one that never had a gradient is in other optimizers.
    How many groups and parameters there are torch compares by itself.

    Args:
        driver: What steps the groups.
        groups: The optimizer's own groups.
        state: Its own state, complete.
        names: The names of the driver's shards.
        loaded: A state dict of an optimizer.

    Raises:
        ConfigurationError: If a group lacks a setting or has one that is out of bounds, or a
            parameter's state lacks a kind or has one of another shape.
        ConfigurationTypeError: If a setting of a group is no number.
    """
    for place, (group, its) in enumerate(zip(groups, loaded["param_groups"], strict=False)):
        lacking = sorted(group.keys() - its.keys() - {"param_names"})
        if lacking:
            rule = f"lacks {', '.join(lacking)}, which {driver.name} steps with"
            way_out = "Load the state of an optimizer of this class and these settings"
            raise ConfigurationError("param_groups", f"group {place}", rule, way_out)
        # a scheduler may have written tensors, whose values the host would wait for
        check_numbers({key: value for key, value in its.items() if not isinstance(value, Tensor)})
    saved = [key for its in loaded["param_groups"] for key in its["params"]]
    for (_, param, number), key in zip(driver.numbered(groups), saved, strict=False):
        if its := loaded["state"].get(key):
            _check_state(driver, names[number], state[param], its)


def _check_state(
    driver: Driver, name: str, own: Mapping[str, Any], loaded: Mapping[str, Any]
) -> None:
    way_out = "Load the state of an optimizer of this class, these settings and this model"
    for kind, value in own.items():
        if kind in driver.dispensable:
            continue
        if kind not in loaded:
            rule = f"lacks {kind!r}, which {driver.name} steps with"
            raise ConfigurationError("state", name, rule, way_out)
        shape = getattr(loaded[kind], "shape", ())
        if isinstance(value, Tensor) and shape != value.shape:
            rule = f"has {kind!r} of shape {tuple(shape)}, and it must be {tuple(value.shape)}"
            raise ConfigurationError("state", name, rule, way_out)
