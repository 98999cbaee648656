"""Which parameter group of a checkpoint belongs to which group of the run that loads it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.versions import megatron_name
from megatron_eopt.routing.groups import GROUP_ID
from megatron_eopt.storage.checkpoint.requests import REQUESTS
from megatron_eopt.storage.checkpoint.saved_groups import saved_groups, saved_steps

__all__ = [
    "STEPS",
    "adapted",
    "check_same_optimizers",
    "children_of",
    "match_groups",
    "resumed_settings",
    "twin_or_none",
]

STEPS = "steps_done"
"""Key of the number of steps in what :func:`children_of` returns."""

_WAY_OUT = "Resume with the optimizers and overrides of the run that wrote the checkpoint"


def match_groups(
    saved: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Return for each present group the place of its twin among the saved ones.

    Groups match by identity; those without one, from a checkpoint of megatron-core's own
    optimizers, by megatron-core's keys, among them the numbers of the schedule.

    Raises:
        ConfigurationError: If a group has no twin or two have the same, with all that differs.
    """
    twins = [_find(group, saved) for group in present]
    found = [place for place in twins if place is not None]
    if len(found) == len(present) == len(saved) == len(set(found)):
        return found
    lacking = [_name(group) for group, place in zip(present, twins, strict=True) if place is None]
    others = [_name(group) for place, group in enumerate(saved) if place not in found]
    raise ConfigurationError(
        "state_dict",
        [_name(group) for group in saved],
        f"must have the parameter groups of this run; it lacks {lacking} and has {others} besides",
        _WAY_OUT,
    )


def resumed_settings(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved group's settings with what the present run decides anew.

    These are the numbers by which megatron-core matches groups (learning rates among them).

    Args:
        saved: Group of a checkpoint.
        present: The present run's group; its settings fill in what the saved one has not.
    """
    names = (*megatron_name("param_group_identifier_keys"), "default_config", "params", GROUP_ID)
    # a key that is absent means something else to the scheduler than one that is None
    kept = {key: value for key, value in saved.items() if key not in names}
    return {**present, **kept}


def twin_or_none(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the twin of a present group among saved ones; empty if it has none."""
    place = _find(group, saved)
    return {} if place is None else saved[place]


def adapted(state: Mapping[Any, Any]) -> dict[int, set[str]] | None:
    """Return which kinds of state each parameter may lack, if a request was adapted."""
    fresh: dict[int, set[str]] | None = getattr(state.get(REQUESTS), "fresh", None)
    return fresh


def children_of(state_dict: Any, chain: Sequence[Any]) -> Any:
    """Return what each optimizer of a chain is to load from its own part of ``state_dict``.

    Where requests were adapted, to a checkpoint that may have another chain's groups, each gets all
    groups and the number of steps.

    Raises:
        ConfigurationError: If it has not these optimizers.
    """
    parts = {0: state_dict}
    if len(chain) > 1 and isinstance(state_dict, Mapping):
        parts = {number: state_dict.get(number) for number in range(len(chain))}
    if not all(isinstance(part, Mapping) and adapted(part) is not None for part in parts.values()):
        check_same_optimizers(state_dict, chain)
        return state_dict
    groups, steps = saved_groups(state_dict), saved_steps(state_dict)
    known = {"param_groups": groups, STEPS: steps}
    result = {}
    for number, part in parts.items():
        own = {key: value for key, value in part.items() if not isinstance(key, int)}
        result[number] = {**own, **known}
        if "optimizer" in own:
            result[number]["optimizer"] = {**own["optimizer"], **known}
    return result if len(chain) > 1 else result[0]


def check_same_optimizers(state_dict: Any, chain: Sequence[Any]) -> None:
    """Raise unless a chain's state has the same optimizers in the same order as ``chain``.

    Args:
        state_dict: What a chain's ``state_dict`` returned, or ``dist_checkpointing`` loaded.
        chain: megatron-core's wrappers.

    Raises:
        ConfigurationError: If it has others.
    """
    saved = [_optimizers(groups) for groups in _children(state_dict)]
    present = [_optimizers(child.param_groups) for child in chain]
    same = len(saved) == len(present) and all(
        None in its or its == mine for its, mine in zip(saved, present, strict=True)
    )
    if not same:
        names = [sorted(map(str, names)) for names in saved]
        raise ConfigurationError(
            "state_dict",
            names,
            f"must hold the state of the optimizers {[sorted(map(str, n)) for n in present]}",
            _WAY_OUT,
        )


def _children(state_dict: Any) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield the groups of each optimizer of a chain's state."""
    children = [state_dict]
    if isinstance(state_dict, list | tuple):
        children = list(state_dict)
    elif not {"optimizer", "param_groups"} & state_dict.keys():
        children = [child for _, child in sorted(state_dict.items())]
    for child in children:
        inner = child.get("optimizer", child)
        yield inner.get("param_groups", [])


def _optimizers(groups: Sequence[Mapping[str, Any]]) -> set[Any]:
    return {_optimizer(group) for group in groups}


def _optimizer(group: Mapping[str, Any]) -> str | None:
    """Return the name of a group's optimizer, None if nothing says it."""
    identity = str(group.get(GROUP_ID, "")).partition("/")[0]
    return group.get("optimizer") or identity or None


def _find(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> int | None:
    for place, candidate in enumerate(saved):
        if GROUP_ID in group and GROUP_ID in candidate:
            if group[GROUP_ID] == candidate[GROUP_ID]:
                return place
        elif _keys(group, group) == _keys(candidate, group):
            return place
    return None


def _keys(group: Mapping[str, Any], present: Mapping[str, Any]) -> list[Any]:
    """Return what megatron-core matches a group by; what names no optimizer fits any."""
    values = {key: _value(group, key) for key in megatron_name("param_group_identifier_keys")}
    if values["optimizer"] is None:
        values["optimizer"] = present.get("optimizer")
    return list(values.values())


def _value(group: Mapping[str, Any], key: str) -> Any:
    # NeMo's spelling has a prefix
    return group.get(key, group.get(f"pre_{key}"))


def _name(group: Mapping[str, Any]) -> str:
    if GROUP_ID in group:
        return str(group[GROUP_ID])
    keys = megatron_name("param_group_identifier_keys")
    return ", ".join(f"{key}={group[key]}" for key in keys if group.get(key) is not None)
