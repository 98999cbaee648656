"""Parameter groups and step counts in checkpoints of this package, megatron-core and NeMo."""

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STEP
from megatron_eopt.routing.groups import GROUP_ID
from megatron_eopt.routing.plain_names import match_names
from megatron_eopt.state.rule import SEPARATOR, Writer, identity_of

type Groups = Sequence[Mapping[str, Any]]

type Members = Mapping[str, Collection[str]]
"""Names of the parameters of groups, by the identity of the group."""

_NONE: Members = MappingProxyType({})

_IDENTIFIERS = (
    *("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "optimizer"),
    *("lr_mult", "is_expert_parallel", "is_decoupled_lr"),
)
"""Keys by which megatron-core matches groups (``param_group_identifier_keys``)."""

PARAM_NAMES = "param_names"
"""Key of the names of a saved group's parameters; torch uses it, too."""

IN_ROWS_OF_MODEL = "in_rows_of_model"
"""Key of saved groups whose rematerialized weights have their state in the model's rows."""

BY_PARAMETER = "param_to_group_meta"
"""Key of the settings of groups by parameter, in ``fsdp_dtensor``."""


def with_names(
    group: Mapping[str, Any], names: Sequence[str], optimizers: Iterable[str]
) -> dict[str, Any]:
    """Return a group to save, whose identity tells its parameters and all groups' optimizers.

    torch's distributed checkpoints merge groups, keep no names beside parameters, and need the same
    keys when they load. So a hash of the names, and all optimizers, are parts of the identity.
    """
    hashes = f"{_hash_of(sorted(names))}.{_hash_of(names)}"
    parts = (identity_of(group), hashes, ",".join(optimizers))
    return {**group, GROUP_ID: SEPARATOR.join(parts)} if GROUP_ID in group else dict(group)


def has_names(group: Mapping[str, Any], *names: Sequence[str], in_order: bool = False) -> bool:
    """Return whether a saved group is, or may be, one of these parameters, in any form."""
    identity = str(group.get(GROUP_ID, "")).split(SEPARATOR)
    if len(identity) != 3:
        return True
    # earlier versions have no hash of the names in order
    unordered, _, ordered = identity[1].partition(".")
    if in_order and ordered:
        return ordered in map(_hash_of, names)
    return unordered in (_hash_of(sorted(each)) for each in names)


def merged_writers(
    group: Mapping[str, Any], names: Iterable[Sequence[str]]
) -> tuple[Writer, ...] | None:
    """Return the optimizers of a saved state dict if torch has merged its groups, else None.

    ``names`` are those of the parameters that are in the group now, in one or several forms.
    """
    if has_names(group, *names):
        return None
    return tuple(map(Writer.parsed, str(group[GROUP_ID]).split(SEPARATOR)[2].split(",")))


def _hash_of(names: Iterable[str]) -> str:
    # the same in every process, unlike Python's own hash of strings
    return f"{zlib.crc32(chr(10).join(names).encode()):08x}"


def children_of(state: Any) -> list[Mapping[Any, Any]]:
    """Return the state of each optimizer of a chain, in order."""
    if isinstance(state, list | tuple):
        return list(state)
    if {"optimizer", "param_groups"} & state.keys():
        return [state]
    return [state[number] for number in sorted(key for key in state if isinstance(key, int))]


def check_state_dict(state: Any) -> None:
    """Raise a ConfigurationError unless ``state`` can be the state of a chain of optimizers."""
    parts = list(state) if isinstance(state, list | tuple) else [state]
    if not all(isinstance(part, Mapping) for part in parts):
        rule = "must be a mapping, or a list with one for each optimizer of the chain"
        hint = "Pass what state_dict() or sharded_state_dict() returned"
        raise ConfigurationError("state_dict", type(state).__name__, rule, hint)


def inner_of(child: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of the torch optimizer inside megatron-core's wrapper."""
    return child.get("optimizer", child)  # type: ignore[no-any-return]


def saved_groups(state: Any) -> list[Mapping[str, Any]]:
    """Return all parameter groups in ``state``, with their step count if it is known."""
    groups: list[Mapping[str, Any]] = []
    for inner in map(inner_of, children_of(state)):
        # megatron-core stores one count beside the state, if all parameters have the same
        common = inner.get("state", {}).get("common_step")
        counted = {} if common is None else {STEP: common}
        # state dicts have names beside their groups, other checkpoints in them
        names = inner.get(PARAM_NAMES)
        for group in inner.get("param_groups", ()):
            named = {} if names is None else {PARAM_NAMES: [names.get(n) for n in group["params"]]}
            groups.append({**counted, **group, **named})
    return groups


def groups_in(state: Any) -> list[Mapping[str, Any]]:
    """Return all parameter groups of optimizers, wherever they are in a state dict."""
    if isinstance(state, Mapping) and isinstance(state.get("param_groups"), list):
        return saved_groups(state)
    parts = state.values() if isinstance(state, Mapping) else state
    is_container = isinstance(state, Mapping | list | tuple)
    return [group for part in parts for group in groups_in(part)] if is_container else []


def saved_steps(state: Any) -> int:
    """Return the step count, which is the same for all optimizers, from wherever it is stored."""
    counts = [group.get(STEP) for group in saved_groups(state)]
    for inner in map(inner_of, children_of(state)):
        states = inner.get("state", {})
        each = (item.get(STEP) for key, item in states.items() if isinstance(key, int | tuple))
        counts += [states.get("common_step"), inner.get(STEP), *each]
    return max((int(step) for step in counts if step is not None), default=0)


def steps_of(groups: Groups, saved: Groups, otherwise: int, members: Members = _NONE) -> int:
    """Return the step count of the matching groups of a checkpoint.

    If all groups are new, because a flag or an override has changed, it is the count of groups of
    the same optimizer, else ``otherwise``.
    """
    twins = [saved[n] for n in find_groups(groups, saved, members) if n is not None]
    readers = {Writer.of(group) for group in groups}
    alike = [g for g in saved if any(Writer.of(g).is_readers(reader) for reader in readers)]
    for candidates in (twins, alike):
        if counts := [int(group[STEP]) for group in candidates if group.get(STEP) is not None]:
            return max(counts)
    return otherwise


def continue_groups(
    groups: Sequence[dict[str, Any]], saved: Groups, members: Members = _NONE
) -> list[Mapping[str, Any] | None]:
    """Load and return the matching groups of a checkpoint, except for settings of the schedule.

    A group without a match keeps its settings; its parameters may have had another optimizer.
    """
    twins = [None if n is None else saved[n] for n in find_groups(groups, saved, members)]
    for group, twin in zip(groups, twins, strict=True):
        if twin is not None:
            take_settings(group, twin)
    return twins


def take_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Load a group's settings, except those that describe or schedule this run's group.

    What the two groups override differently is this run's. A learning rate then begins where the
    schedule of the checkpoint has come to.
    """
    # a load must not change the schedule, nor what megatron-core matches groups by
    keep = {"params", STEP, "default_config", GROUP_ID, "max_lr", "min_lr", *_IDENTIFIERS}
    # this run chooses torch's implementation and where it counts steps
    keep |= {PARAM_NAMES, IN_ROWS_OF_MODEL, "fused", "foreach", "capturable"}
    changed = _overridden_otherwise(group, saved)
    keep |= {_WRITTEN_BY_SCHEDULES.get(name, name) for name in changed}
    rates = saved.get("lr"), saved.get("max_lr"), group.get("max_lr")
    if "max_lr" in changed and None not in rates and saved["max_lr"] > 0:
        group["lr"] = saved["lr"] * (group["max_lr"] / saved["max_lr"])
    group.update({key: value for key, value in saved.items() if key not in keep})


_WRITTEN_BY_SCHEDULES = {"max_lr": "lr", "start_wd": "weight_decay", "end_wd": "weight_decay"}
"""Settings that schedules change in each step, by the values that these start from."""


def _overridden_otherwise(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """Return the settings that only one of two groups overrides, or both with other values."""
    first, second = overridden(one), overridden(other)
    both = first.keys() & second.keys()
    return (first.keys() ^ second.keys()) | {name for name in both if first[name] != second[name]}


def overridden(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that differ from its run's, by name."""
    names = f"{identity_of(group)}//".split("/")[2].split("+")
    written = {"", *_WRITTEN_BY_SCHEDULES.values()}
    return {name: group.get(name) for name in names if name not in written}


def match_all(saved: Groups, present: Groups) -> list[int]:
    """Return, for each present group, the index of the matching saved group.

    Raises:
        ConfigurationError: If the groups do not match one to one; names the groups that differ.
    """
    twins = [
        next((n for n, other in enumerate(saved) if _continues(group, other)), None)
        for group in present
    ]
    matched = [index for index in twins if index is not None]
    if len(matched) == len(present) == len(saved) == len(set(matched)):
        return matched
    lacking = [_name(group) for group, index in zip(present, twins, strict=True) if index is None]
    others = [_name(group) for index, group in enumerate(saved) if index not in matched]
    rule = f"must have the parameter groups of this run, but it lacks {lacking} and has {others}"
    hint = "Resume with the optimizers and overrides of the run that wrote the checkpoint"
    raise ConfigurationError("state_dict", [_name(group) for group in saved], rule, hint)


def is_identified(group: Mapping[str, Any]) -> bool:
    """Return whether a group has an identity, or megatron-core's keys."""
    return GROUP_ID in group or any(key.endswith("is_expert_parallel") for key in group)


def find_groups(groups: Groups, saved: Groups, members: Members = _NONE) -> list[int | None]:
    """Find the saved group that each group's settings continue from.

    Of those with the same writer, it is one that had the group's parameters, as far as names are
    known: of several, one with the same overrides, or else with most parameters. If none had any,
    it is the one that is called alike, or any other that names what it overrides, which is not
    taken.

    Args:
        groups: The groups.
        saved: The groups of a checkpoint.
        members: Names of the parameters of this run's groups, by the identity of the group.
    """
    writers = [Writer.of(group) for group in saved]
    theirs = [group.get(PARAM_NAMES) or group.get("params", ()) for group in saved]
    # a parameter that is in several groups counts for each
    holders: dict[str, list[int]] = {}
    for index, of_group in enumerate(theirs):
        for name in of_group:
            holders.setdefault(str(name), []).append(index)
    own = dict.fromkeys(name for group in groups for name in members.get(identity_of(group), ()))
    matched = match_names(own, holders)
    found = []
    for group in groups:
        reader, ranked = Writer.of(group), []
        names = members.get(identity_of(group), ())
        shared = Counter(i for name in names for i in holders.get(matched.get(name, ""), ()))
        for index, candidate in enumerate(saved):
            if not writers[index].is_readers(reader):
                continue
            is_twin = _is_twin(group, candidate)
            if shared[index] or is_twin or (GROUP_ID in group and GROUP_ID in candidate):
                others = len(_overridden_otherwise(group, candidate))
                ranked.append(
                    (shared[index] > 0, not others, shared[index], is_twin, -others, -index)
                )
        found.append(-max(ranked)[-1] if ranked else None)
    return found


def _continues(group: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    return _is_twin(group, saved) and bool(Writer.of(saved).is_readers(Writer.of(group)))


def _is_twin(group: Mapping[str, Any], candidate: Mapping[str, Any]) -> bool:
    """Return whether both are called alike; groups of megatron-core are called by its keys."""
    if GROUP_ID in group and GROUP_ID in candidate:
        return identity_of(group) == identity_of(candidate)
    return _keys(group, group) == _keys(candidate, group)


def _keys(group: Mapping[str, Any], present: Mapping[str, Any]) -> list[Any]:
    """Return megatron-core's keys of a group; a group without an optimizer's name fits any."""
    # NeMo writes these names with a prefix
    values = {key: group.get(key, group.get(f"pre_{key}")) for key in _IDENTIFIERS}
    if values["optimizer"] is None:
        values["optimizer"] = present.get("optimizer")
    return list(values.values())


def _name(group: Mapping[str, Any]) -> str:
    if GROUP_ID in group:
        return identity_of(group)
    return ", ".join(f"{k}={group[k]}" for k in _IDENTIFIERS if group.get(k) is not None)
