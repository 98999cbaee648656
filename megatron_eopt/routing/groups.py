"""Parameter groups: a partition of the routed parameters that is the same on every rank.

A group's *identity* is what resuming matches it by. It is made of the optimizer, whether the
parameters are experts', and the names of the settings that differ from the run's, never of their
numbers, so that a run can be resumed with another learning rate.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_eopt.routing.routes import Route

GROUP_ID = "group_id"
"""Key of a parameter group that holds its identity."""


@dataclass(frozen=True)
class GroupKey:
    """What all parameters of a group have in common.

    Attributes:
        optimizer: Name of their optimizer.
        is_expert: Whether they are experts' parameters.
        values: Settings that differ from the run's, sorted by name.
    """

    optimizer: str
    is_expert: bool
    values: tuple[tuple[str, Any], ...]

    @property
    def kind(self) -> str:
        """The identity as far as the key alone determines it."""
        names = "+".join(name for name, _ in self.values)
        return f"{self.optimizer}/{'expert' if self.is_expert else 'dense'}/{names}"


@dataclass(frozen=True)
class GroupSummary:
    """What the other ranks need to know about one group of one rank.

    Attributes:
        key: The group's key.
        labels: The overrides its settings come from.
        chunks: The model chunks its parameters are in.
    """

    key: GroupKey
    labels: frozenset[str]
    chunks: frozenset[int]


@dataclass(frozen=True)
class Group:
    """One parameter group as this rank sees it; it may have no member here.

    Attributes:
        key: What its parameters have in common.
        identity: What resuming matches it by, unique among the groups.
        members: This rank's parameters.
        chunks: The model chunks that hold members on any rank.
    """

    key: GroupKey
    identity: str
    members: tuple[Route, ...]
    chunks: frozenset[int]


def key_of(route: Route) -> GroupKey:
    """Return the key of the group that ``route`` belongs to."""
    return GroupKey(route.optimizer, route.parameter.is_expert, tuple(sorted(route.values.items())))


def summarize(routes: Iterable[Route]) -> list[GroupSummary]:
    """Return what other ranks need to know about this rank's groups."""
    labels: dict[GroupKey, set[str]] = {}
    chunks: dict[GroupKey, set[int]] = {}
    for route in routes:
        key = key_of(route)
        labels.setdefault(key, set()).update(route.labels)
        chunks.setdefault(key, set()).add(route.parameter.chunk)
    return [GroupSummary(key, frozenset(labels[key]), frozenset(chunks[key])) for key in labels]


def build_groups(routes: Sequence[Route], everyones: Iterable[GroupSummary]) -> list[Group]:
    """Return this rank's groups in an order, and with identities, that all ranks agree on.

    Args:
        routes: This rank's routes.
        everyones: The summaries of all ranks' groups.
    """
    labels: dict[GroupKey, set[str]] = {}
    chunks: dict[GroupKey, set[int]] = {}
    for summary in everyones:
        labels.setdefault(summary.key, set()).update(summary.labels)
        chunks.setdefault(summary.key, set()).update(summary.chunks)
    members: dict[GroupKey, list[Route]] = {key: [] for key in labels}
    for route in routes:
        members[key_of(route)].append(route)
    return [
        Group(key, identity, tuple(members[key]), frozenset(chunks[key]))
        for key, identity in _identities(labels)
    ]


def param_group(
    group: Group, params: Sequence[Any], *, lr: float | None, min_lr: float | None
) -> dict[str, Any]:
    """Return the dictionary that torch's optimizer and Megatron's scheduler work with.

    Args:
        group: The group.
        params: Those of its parameters that the optimizer holds.
        lr: The run's learning rate, which the group's own settings override.
        min_lr: The run's minimum.
    """
    values = dict(group.key.values)
    return {
        "params": list(params),
        "is_expert_parallel": group.key.is_expert,
        # Megatron's log shows the learning rate of the groups that follow the run's schedule.
        "default_config": not any("lr" in name for name in values),
        "wd_mult": 1.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": lr,
        "min_lr": min_lr,
        **values,
        "optimizer": group.key.optimizer,
        GROUP_ID: group.identity,
    }


def _identities(labels: Mapping[GroupKey, set[str]]) -> list[tuple[GroupKey, str]]:
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
