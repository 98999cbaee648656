"""Parameter groups and step counts in checkpoints of this package, megatron-core and NeMo."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STEP
from megatron_eopt.base.upstream import needed
from megatron_eopt.checkpoint.rates import adopt_rates, check_rates
from megatron_eopt.routing.groups import GROUP_ID

type Groups = Sequence[Mapping[str, Any]]


def children_of(state: Any) -> list[Mapping[Any, Any]]:
    """Return the state of each optimizer of a chain, in order."""
    if isinstance(state, list | tuple):
        return list(state)
    if {"optimizer", "param_groups"} & state.keys():
        return [state]
    return [state[number] for number in sorted(key for key in state if isinstance(key, int))]


def inner_of(child: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the torch optimizer inside megatron-core's wrapper."""
    return child.get("optimizer", child)  # type: ignore[no-any-return]


def saved_groups(state: Any) -> list[Mapping[str, Any]]:
    """Return all parameter groups in ``state``, with their step count if it is known."""
    found: list[Mapping[str, Any]] = []
    for inner in map(inner_of, children_of(state)):
        common = inner.get("state", {}).get("common_step")
        counted = {} if common is None else {STEP: common}
        found += [{**counted, **group} for group in inner.get("param_groups", ())]
    return found


def saved_steps(state: Any) -> int:
    """Return the step count, which is the same for all optimizers, from wherever it is stored."""
    found = [group.get(STEP) for group in saved_groups(state)]
    for inner in map(inner_of, children_of(state)):
        states = inner.get("state", {})
        each = (values.get(STEP) for key, values in states.items() if isinstance(key, int))
        found += [states.get("common_step"), inner.get(STEP), *each]
    return max((int(step) for step in found if step is not None), default=0)


def steps_of(groups: Groups, saved: Groups, otherwise: int) -> int:
    """Return the step count of the matching groups of a checkpoint, else ``otherwise``."""
    twins = [saved[place] for group in groups if (place := _find(group, saved)) is not None]
    return max((int(g[STEP]) for g in twins if g.get(STEP) is not None), default=otherwise)


def adopt(group: dict[str, Any], saved: Groups) -> None:
    """Load the settings of the matching group of a checkpoint; see ``rates`` for the schedule.

    A group without a match keeps its settings; its parameters may have had another optimizer.
    """
    keep = {"params", STEP, "default_config", GROUP_ID, "max_lr", "min_lr", *_identifiers()}
    # this run chooses torch's implementation and where it counts steps
    keep |= {"fused", "foreach", "capturable"}
    place = _find(group, saved)
    twin = {} if place is None else saved[place]
    group.update({key: value for key, value in twin.items() if key not in keep})
    adopt_rates(group, twin)


def check_schedule(present: Groups, saved: Groups) -> None:
    """Raise a ConfigurationError if the run asks for rates that the checkpoint does not have."""
    alone = [group for group in present if _find(group, saved) is None]
    gone = [group for group in saved if all(_find(other, [group]) is None for other in present)]
    check_rates(alone, gone, optimizers_of(present))


def match_all(saved: Groups, present: Groups) -> list[int]:
    """Return, for each present group, the index of the matching saved group.

    Raises:
        ConfigurationError: If the groups do not match one to one; names the groups that differ.
    """
    twins = [_find(group, saved) for group in present]
    found = [place for place in twins if place is not None]
    if len(found) == len(present) == len(saved) == len(set(found)):
        return found
    lacking = [_name(group) for group, place in zip(present, twins, strict=True) if place is None]
    others = [_name(group) for place, group in enumerate(saved) if place not in found]
    rule = f"must have the parameter groups of this run, but it lacks {lacking} and has {others}"
    way_out = "Resume with the optimizers and overrides of the run that wrote the checkpoint"
    raise ConfigurationError("state_dict", [_name(group) for group in saved], rule, way_out)


def optimizers_of(groups: Groups) -> set[str | None]:
    """Return the optimizer names of some groups; None for a group that names none."""
    return {
        group.get("optimizer") or str(group.get(GROUP_ID, "")).partition("/")[0] or None
        for group in groups
    }


def _find(group: Mapping[str, Any], saved: Groups) -> int | None:
    """Find a group by its identity, or by megatron-core's keys if megatron-core wrote it."""
    for place, candidate in enumerate(saved):
        if GROUP_ID in group and GROUP_ID in candidate:
            if group[GROUP_ID] == candidate[GROUP_ID]:
                return place
        elif _keys(group, group) == _keys(candidate, group):
            return place
    return None


def _identifiers() -> tuple[str, ...]:
    return tuple(needed("param_group_identifier_keys"))


def _keys(group: Mapping[str, Any], present: Mapping[str, Any]) -> list[Any]:
    """Return megatron-core's keys of a group; a group without an optimizer's name fits any."""
    # NeMo writes these names with a prefix
    values = {key: group.get(key, group.get(f"pre_{key}")) for key in _identifiers()}
    if values["optimizer"] is None:
        values["optimizer"] = present.get("optimizer")
    return list(values.values())


def _name(group: Mapping[str, Any]) -> str:
    if GROUP_ID in group:
        return str(group[GROUP_ID])
    return ", ".join(f"{k}={group[k]}" for k in _identifiers() if group.get(k) is not None)
