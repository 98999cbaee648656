"""Parameter groups: a partition of the routed parameters that is the same on every rank.

A group's *identity* is what resuming matches it by. It is made of the optimizer, whether the
parameters are experts', and the names of the settings that differ from the run's, never of their
numbers, so that a run can be resumed with another learning rate.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_eopt.routing.routes import USUAL_VALUES, Route

GROUP_ID = "group_id"
"""Key of a parameter group that holds its identity."""


@dataclass(frozen=True)
class GroupKey:
    """What all parameters of a group have in common."""

    optimizer: str  # name of their optimizer
    is_expert: bool  # whether they are experts' parameters
    values: tuple[tuple[str, Any], ...]  # settings that differ from the run's, sorted by name

    @property
    def kind(self) -> str:
        """The identity as far as the key alone determines it."""
        names = "+".join(name for name, _ in self.values)
        return f"{self.optimizer}/{'expert' if self.is_expert else 'dense'}/{names}"


type Summary = tuple[GroupKey, frozenset[str]]
"""What other ranks need to know of a group: its key, and the overrides its settings come from."""


@dataclass(frozen=True)
class Group:
    """One parameter group as this rank sees it; it may have no parameter here."""

    key: GroupKey  # what its parameters have in common
    identity: str  # what resuming matches it by, unique among the groups
    routes: tuple[Route, ...]  # this rank's parameters


def key_of(route: Route) -> GroupKey:
    """Return the key of the group that ``route`` belongs to."""
    return GroupKey(route.optimizer, route.parameter.is_expert, tuple(sorted(route.values.items())))


def summarize(routes: Iterable[Route]) -> list[Summary]:
    """Return what other ranks need to know about this rank's groups."""
    return [
        (key, frozenset(label for route in alike for label in route.labels))
        for key, alike in _by_key(routes).items()
    ]


def _by_key(routes: Iterable[Route]) -> dict[GroupKey, list[Route]]:
    by_key = defaultdict(list)
    for route in routes:
        by_key[key_of(route)].append(route)
    return by_key


def build_groups(routes: Sequence[Route], everyones: Iterable[Summary]) -> list[Group]:
    """Return this rank's groups in an order, and with identities, that all ranks agree on.

    ``everyones`` are the summaries of all ranks' groups.
    """
    labels: dict[GroupKey, frozenset[str]] = {}
    for key, its in everyones:
        labels[key] = labels.get(key, frozenset()) | its
    mine = _by_key(routes)
    return [Group(key, name, tuple(mine.get(key, ()))) for key, name in _identities(labels)]


def param_group(
    group: Group, params: Sequence[Any], *, lr: float | None, min_lr: float | None
) -> dict[str, Any]:
    """Return the dictionary that torch's optimizer and Megatron's scheduler work with.

    ``params`` are those of the group that the optimizer holds, ``lr`` and ``min_lr`` the run's,
    which the group's own settings override.
    """
    values = dict(group.key.values)
    # megatron-core's scheduler has its own rates where a group names none
    rates = {name: rate for name, rate in (("max_lr", lr), ("min_lr", min_lr)) if rate is not None}
    return {
        "params": list(params),
        "is_expert_parallel": group.key.is_expert,
        # Megatron's log shows the learning rate of the groups that follow the run's schedule.
        "default_config": not any("lr" in name for name in values),
        **USUAL_VALUES,
        **rates,
        **values,
        "optimizer": group.key.optimizer,
        GROUP_ID: group.identity,
    }


def _identities(labels: Mapping[GroupKey, frozenset[str]]) -> list[tuple[GroupKey, str]]:
    """Number groups apart where kind, and then the overrides' descriptions, do not suffice."""
    result = []
    for kind, keys in groupby(sorted(labels, key=_order), key=lambda key: key.kind):
        same_kind = list(keys)
        if len(same_kind) == 1:
            result.append((same_kind[0], kind))
            continue
        named = [(f"{kind}/{' | '.join(sorted(labels[key]))}", key) for key in same_kind]
        for name, twins in groupby(sorted(named, key=lambda pair: pair[0]), key=lambda p: p[0]):
            alike = [key for _, key in twins]
            for number, key in enumerate(alike):
                result.append((key, name if len(alike) == 1 else f"{name}/{number}"))
    return result


def _order(key: GroupKey) -> tuple[Any, ...]:
    """Sort by kind first, so that no number decides the order while names can."""
    values = tuple(
        (name, 0, float(value), "")
        if isinstance(value, int | float)
        else (name, 1, 0.0, f"{type(value).__name__}:{value!r}")
        for name, value in key.values
    )
    return (key.kind, values)
