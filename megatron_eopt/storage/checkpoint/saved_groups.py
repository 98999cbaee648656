"""Parameter groups and step counts of checkpoints, whoever wrote them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_eopt.base.errors import ConfigurationTypeError
from megatron_eopt.base.versions import megatron_name
from megatron_eopt.routing.groups import GROUP_ID

__all__ = ["adopt", "check_structure", "parts_of", "saved_groups", "saved_scaler", "saved_steps"]


def check_structure(state: Any) -> None:
    """Raise unless ``state`` is built like the state of a chain of optimizers, or of one.

    Raises:
        ConfigurationTypeError: If something in it is no mapping or list where there must be one.
    """
    children = dict(enumerate(state)) if isinstance(state, list | tuple) else state
    _check("", children, Mapping)
    numbered = [(f"[{key}]", part) for key, part in children.items() if isinstance(key, int)]
    for place, part in [("", children), *numbered]:
        _check(place, part, Mapping)
        _check(f"{place}['grad_scaler']", part.get("grad_scaler") or {}, Mapping)
        _check(f"{place}['optimizer']", part.get("optimizer", {}), Mapping)
        inner = part.get("optimizer", part)
        groups = inner.get("param_groups", [])
        _check(f"{place}['param_groups']", groups, list | tuple)
        for group in groups:
            _check(f"{place}['param_groups'][...]", group, Mapping)
            _check(f"{place}['param_groups'][...]['params']", group.get("params", []), list)
        states = inner.get("state", {})
        _check(f"{place}['state']", states, Mapping)
        for number, values in states.items():
            if isinstance(number, int):
                _check(f"{place}['state'][{number}]", values, Mapping)


def _check(place: str, value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        raise ConfigurationTypeError(
            f"state_dict{place}",
            value,
            f"must be a {'mapping' if kind is Mapping else 'list'}",
            "Pass what state_dict returned, or dist_checkpointing.load",
        )


def parts_of(state: Any, members: int) -> list[dict[Any, Any]]:
    """Return what each member of a chain of optimizers is to load.

    What is common to all parameters comes with every part, wherever the chain that wrote it, which
    may have had other members, has put it.

    Args:
        state: What was loaded for the chain, or returned by its ``state_dict``.
        members: Number of its members.
    """
    if isinstance(state, list | tuple):
        state = dict(enumerate(state))
    own = [state] if members == 1 else [state.get(number, {}) for number in range(members)]
    return [{**state, **part} for part in own]


def saved_groups(state: Mapping[Any, Any]) -> list[Mapping[str, Any]]:
    """Return the parameter groups of all optimizers whose states ``state`` holds."""
    return [group for inner in _inner(state) for group in inner.get("param_groups", ())]


def saved_steps(state: Mapping[Any, Any]) -> int:
    """Return the number of steps done: the same for all optimizers, and kept in several places."""
    found = [group.get("step") for group in saved_groups(state)]
    for inner in _inner(state):
        found.append(inner.get("state", {}).get("common_step"))
    return max((int(step) for step in found if step is not None), default=0)


def saved_scaler(state: Mapping[Any, Any]) -> Mapping[str, Any] | None:
    """Return the state of the loss scale, None if there is none."""
    scalers = [item["grad_scaler"] for item in _states(state) if item.get("grad_scaler")]
    return scalers[0] if scalers else None


def adopt(group: dict[str, Any], saved: Sequence[Mapping[str, Any]]) -> None:
    """Take over what a checkpoint has in the same group, but not the numbers of its schedule.

    A group that the checkpoint does not have, because its parameters had another optimizer or
    another program wrote it, keeps all its settings.

    Args:
        group: The present group; changed in place.
        saved: Groups of the checkpoint.
    """
    keep = {"params", "step", "default_config", *megatron_name("param_group_identifier_keys")}
    twin = _twin(group, saved)
    group.update({key: value for key, value in twin.items() if key not in keep})


def _twin(group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    keys = (GROUP_ID,) if GROUP_ID in group else megatron_name("param_group_identifier_keys")
    identity = [group.get(key) for key in keys]
    twins = (item for item in saved if [item.get(key) for key in keys] == identity)
    return next(twins, {})


def _states(state: Mapping[Any, Any]) -> Iterator[Mapping[Any, Any]]:
    yield state
    yield from (value for key, value in state.items() if isinstance(key, int))


def _inner(state: Mapping[Any, Any]) -> Iterator[Mapping[str, Any]]:
    for item in _states(state):
        if "optimizer" in item:
            yield item["optimizer"]
        elif "param_groups" in item:
            yield item
