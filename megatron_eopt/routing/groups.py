"""Parameter groups, which are the same on every rank.

A checkpoint matches groups by their *identity*: the optimizer, whether they hold experts, and the
names of settings that differ from the run's. Values are left out, so that a run can resume with
another learning rate.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.routing.routes import USUAL_VALUES, GroupKey, Route

GROUP_ID = "group_id"
"""Key under which a parameter group holds its identity."""


type Summary = tuple[GroupKey, frozenset[str]]
"""What other ranks need to know about a group: its key and descriptions of its overrides."""


@dataclass(frozen=True)
class Group:
    """One parameter group, which may have no parameter on this rank."""

    key: GroupKey  # what its parameters share
    identity: str  # how checkpoints match it; unique among the groups
    routes: tuple[Route, ...]  # this rank's parameters


def summarize(routes: Iterable[Route]) -> list[Summary]:
    """Return what other ranks need to know about this rank's groups."""
    return [
        (key, frozenset(label for route in alike for label in route.labels))
        for key, alike in _by_key(routes).items()
    ]


def _by_key(routes: Iterable[Route]) -> dict[GroupKey, list[Route]]:
    by_key = defaultdict(list)
    for route in routes:
        by_key[route.key].append(route)
    return by_key


def build_groups(routes: Sequence[Route], summaries: Iterable[Summary]) -> list[Group]:
    """Return this rank's groups, ordered and named by the ``summaries`` of all ranks."""
    labels: dict[GroupKey, frozenset[str]] = {}
    for key, rank_labels in summaries:
        labels[key] = labels.get(key, frozenset()) | rank_labels
    own_routes = _by_key(routes)
    # also groups without a parameter here: optimizers and checkpoints need the same on all ranks
    return [Group(key, name, tuple(own_routes.get(key, ()))) for key, name in _identities(labels)]


def param_group(
    group: Group, params: Sequence[Any], *, lr: float | None, min_lr: float | None
) -> dict[str, Any]:
    """Return a group as the dictionary that torch optimizers and Megatron's scheduler expect.

    ``params`` are the tensors that the optimizer holds for the group. Rates that the group sets
    override the run's ``lr`` and ``min_lr``.
    """
    values = dict(group.key.values)
    # without these keys, megatron-core's scheduler uses its own rates
    rates = {name: rate for name, rate in (("max_lr", lr), ("min_lr", min_lr)) if rate is not None}
    _check_rates(group, {**rates, **values})
    # if no scheduler writes these
    first = {"lr": values.get("max_lr"), "weight_decay": values.get("start_wd")}
    return {
        "params": list(params),
        "is_expert_parallel": group.key.is_expert,
        # Megatron logs the learning rate of groups that follow the run's schedule
        "default_config": not any("lr" in name for name in values),
        **USUAL_VALUES,
        **rates,
        **{name: value for name, value in first.items() if value is not None},
        **values,
        "optimizer": group.key.optimizer,
        GROUP_ID: group.identity,
    }


def _check_rates(group: Group, values: Mapping[str, Any]) -> None:
    """Raise a ConfigurationError if a group's own learning rate would rise to the lowest one."""
    largest, least = values.get("max_lr"), values.get("min_lr")
    own = {"max_lr", "min_lr"} & dict(group.key.values).keys()
    if own and largest is not None and least is not None and largest < least:
        rule = f"is below the lowest learning rate of its schedule, min_lr={least}"
        hint = "Also set a lower one: muon_min_lr, decoupled_min_lr, or min_lr in the override"
        raise ConfigurationError(f"max_lr of {group.identity}", largest, rule, hint)


def _identities(labels: Mapping[GroupKey, frozenset[str]]) -> list[tuple[GroupKey, str]]:
    """Make kinds unique by descriptions of the overrides and, if needed, by numbers."""
    result = []
    # sorted, so that ranks with parameters in another order number the groups alike
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
    """Return a sort key: the kind first, then names and values of settings."""
    values = tuple(
        (name, 0, float(value), "")
        if isinstance(value, int | float)
        else (name, 1, 0.0, f"{type(value).__name__}:{value!r}")
        for name, value in key.values
    )
    return (key.kind, values)
