"""Parameter groups and step counts of checkpoints, whoever wrote them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_eopt.base.versions import megatron_name
from megatron_eopt.routing.groups import GROUP_ID

__all__ = ["adopt", "parts_of", "saved_groups", "saved_scaler", "saved_steps"]


def parts_of(state: Mapping[Any, Any], members: int) -> list[dict[Any, Any]]:
    """Return what each member of a chain of optimizers is to load.

    What is common to all parameters comes with every part, wherever the chain that wrote it, which
    may have had other members, has put it.

    Args:
        state: What was loaded for the chain.
        members: Number of its members.
    """
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
