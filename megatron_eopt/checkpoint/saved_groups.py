"""Parameter groups and step counts in checkpoints of this package, megatron-core and NeMo."""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STEP
from megatron_eopt.base.upstream import require_upstream
from megatron_eopt.checkpoint.continuation import SavedState
from megatron_eopt.config.registry import meaning_of, meanings_of, name_of_class
from megatron_eopt.config.writers import UNKNOWN, momentum_of, writers_by_settings
from megatron_eopt.routing.groups import GROUP_ID
from megatron_eopt.routing.plain_names import match_names

type Groups = Sequence[Mapping[str, Any]]

type Members = Mapping[str, Collection[str]]
"""Names of the parameters of groups, by the identity of the group."""

_NONE: Members = MappingProxyType({})

PARAM_NAMES = "param_names"
"""Key of the names of a saved group's parameters; torch uses it, too."""

BY_PARAMETER = "param_to_group_meta"
"""Key of the settings of groups by parameter, in ``fsdp_dtensor``."""

_SEPARATOR = "\t"
"""Between a saved group's identity, the hash of its parameters' names, and all optimizers' names.

torch's distributed checkpoints merge groups, keep no names beside parameters, and need the same
keys when they load. So these are parts of the identity.
"""


def identity_of(group: Mapping[str, Any]) -> str:
    """Return a group's identity; empty if it has none."""
    return str(group.get(GROUP_ID, "")).partition(_SEPARATOR)[0]


def with_names(
    group: Mapping[str, Any], names: Iterable[str], optimizers: Iterable[str]
) -> dict[str, Any]:
    """Return a group to save, whose identity tells its parameters and all groups' optimizers."""
    parts = (identity_of(group), _hash_of(names), ",".join(optimizers))
    return {**group, GROUP_ID: _SEPARATOR.join(parts)} if GROUP_ID in group else dict(group)


def has_names(group: Mapping[str, Any], *names: Iterable[str]) -> bool:
    """Return whether a saved group is, or may be, one of these parameters, in any form."""
    identity = str(group.get(GROUP_ID, "")).split(_SEPARATOR)
    return len(identity) != 3 or identity[1] in map(_hash_of, names)


def merged_optimizers(
    group: Mapping[str, Any], names: Iterable[Iterable[str]]
) -> tuple[str, ...] | None:
    """Return the optimizers of a saved state dict if torch has merged its groups, else None.

    ``names`` are those of the parameters that are in the group now, in one or several forms.
    """
    if has_names(group, *names):
        return None
    return tuple(str(group[GROUP_ID]).split(_SEPARATOR)[2].split(","))


def _hash_of(names: Iterable[str]) -> str:
    # the same in every process, unlike Python's own hash of strings
    return f"{zlib.crc32(chr(10).join(sorted(names)).encode()):08x}"


def optimizer_of(group: Mapping[str, Any]) -> str | None:
    """Return the registered name of the optimizer that a group names; None if it names none."""
    identity = identity_of(group).partition("/")[0]
    # NeMo writes megatron-core's names with a prefix
    named = identity or group.get("optimizer") or group.get("pre_optimizer")
    return name_of_class(str(named)) if named else None


def writers_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the optimizers that may have written a group: those that its settings fit.

    It is ``UNKNOWN`` alone if they fit none.
    """
    named = optimizer_of(group)
    return writers_by_settings(group) if named is None else (named,)


class SavedGroups:
    """The parameter groups of a checkpoint, and which optimizer wrote each parameter's state.

    Args:
        groups: The groups. Checkpoints of this package name their parameters.
        ours: Names of the optimizers of this run, in case the checkpoint names no parameters.
    """

    def __init__(self, groups: Groups = (), ours: Collection[str] = ()) -> None:
        self.groups = groups
        self._group_of = {name: group for group in groups for name in group.get(PARAM_NAMES, ())}
        # megatron-core names all optimizers but the main one, which gets the matrices
        scalars = [group for group in groups if optimizer_of(group) is not None]
        self._is_megatrons = 0 < len(scalars) < len(groups) and not any(
            GROUP_ID in group for group in groups
        )
        written, wanted = [{*writers_of(group)} for group in groups], {*ours}
        self._is_alike = wanted <= {*chain(*written)} and all(map(wanted.intersection, written))

    def state_of(
        self, names: Sequence[str], keys: Collection[str], reader: str, *, is_matrix: bool
    ) -> SavedState:
        """Return what a checkpoint has of a parameter, given the ``keys`` of its saved state.

        Args:
            names: Names under which the checkpoint may know the parameter.
            keys: Keys of its saved state.
            reader: The optimizer that loads it.
            is_matrix: Whether megatron-core gives it to the main optimizer.
        """
        group = next((self._group_of[name] for name in names if name in self._group_of), None)
        if group is not None:
            return state_in([group], keys, reader)
        groups = self.groups
        if self._is_megatrons:
            groups = [g for g in groups if is_matrix == (optimizer_of(g) is None)]
            if self._is_alike and not any(reader in writers_of(g) for g in groups):
                # this run gives the parameter to another of its optimizers than megatron-core does
                return SavedState(frozenset(keys), (UNKNOWN,))
        saved = state_in(groups, keys, reader)
        if self._is_alike and reader in saved.optimizers:
            # with the optimizers of this run, each parameter had the one that it has now
            return replace(saved, optimizers=(reader,))
        return saved


def state_in(groups: Groups, keys: Collection[str], reader: str) -> SavedState:
    """Return a parameter's saved state, given its keys and the groups that may have had it."""
    writers = [(names, group) for group in groups if (names := _fitting(group, keys))]
    # a group that names its optimizer may have further state, which users have added
    writers = writers or [((optimizer_of(group) or UNKNOWN,), group) for group in groups]
    optimizers = tuple(dict.fromkeys(chain(*(names for names, _ in writers))))
    meanings = {tuple(meaning_of(name, key) for key in keys) for name in optimizers}
    if reader in optimizers and len(meanings) == 1:
        optimizers = (reader,)
    # a mean becomes a sum by the writer's momentum, so it must be known without doubt
    momenta = {momentum_of(group) for _, group in writers}
    momentum = momenta.pop() if len(momenta) == 1 else None
    return SavedState(frozenset(keys), optimizers or (UNKNOWN,), momentum)


def _fitting(group: Mapping[str, Any], keys: Collection[str]) -> tuple[str, ...]:
    """Return which of the optimizers of a group can have written state with these keys."""
    return tuple(
        name
        for name in writers_of(group)
        if not (own_keys := meanings_of(name).keys())
        # keys of nested state, and of a weight's matrices, are paths
        or all(own_keys & set(key.split("/")) for key in keys if not key.endswith(f"/{STEP}"))
    )


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
    indices = (find_group(group, saved, members) for group in groups)
    twins = [saved[index] for index in indices if index is not None]
    names = set(map(optimizer_of, groups)) - {None}
    alike = [group for group in saved if names & {*writers_of(group)}]
    for candidates in (twins, alike):
        if counts := [int(group[STEP]) for group in candidates if group.get(STEP) is not None]:
            return max(counts)
    return otherwise


def adopt(
    group: dict[str, Any], saved: Groups, members: Members = _NONE
) -> Mapping[str, Any] | None:
    """Load and return the matching group of a checkpoint, except for settings of the schedule.

    A group without a match keeps its settings; its parameters may have had another optimizer.
    """
    index = find_group(group, saved, members)
    if index is None:
        return None
    take_settings(group, saved[index])
    return saved[index]


def take_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Load a group's settings, except those that describe or schedule this run's group.

    What the two groups override differently is this run's. A learning rate then begins where the
    schedule of the checkpoint has come to.
    """
    # a load must not change the schedule, nor what megatron-core matches groups by
    keep = {"params", STEP, "default_config", GROUP_ID, "max_lr", "min_lr", *_identifiers()}
    # this run chooses torch's implementation and where it counts steps
    keep |= {PARAM_NAMES, "fused", "foreach", "capturable"}
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
        next((index for index, other in enumerate(saved) if _is_twin(group, other)), None)
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


def optimizers_of(groups: Groups) -> set[str | None]:
    """Return the optimizer names of some groups; None for a group that names none."""
    return {
        group.get("optimizer") or identity_of(group).partition("/")[0] or None for group in groups
    }


def is_identified(group: Mapping[str, Any]) -> bool:
    """Return whether a group has an identity, or megatron-core's keys."""
    return GROUP_ID in group or any(key.endswith("is_expert_parallel") for key in group)


def find_group(group: Mapping[str, Any], saved: Groups, members: Members = _NONE) -> int | None:
    """Find the saved group that a group's settings continue from.

    It is one that had the group's parameters, as far as names are known: of several, one with the
    same overrides, or else with most parameters. If none had any, it is the one that is called
    alike, or any other, because groups of one optimizer differ in their overrides only, and these
    are not taken. What groups of megatron-core override is not known, so that these must have its
    keys. A group of another optimizer never matches, because its settings mean other things.

    Args:
        group: The group.
        saved: The groups of a checkpoint.
        members: Names of the parameters of this run's groups, by the identity of the group.
    """
    names = members.get(identity_of(group), ())
    ranked = []
    for index, candidate in enumerate(saved):
        if not _is_of_same_optimizer(group, candidate):
            continue
        theirs = candidate.get(PARAM_NAMES) or candidate.get("params", ())
        shared = len(match_names(names, {name for name in theirs if isinstance(name, str)}))
        is_twin = _is_twin(group, candidate)
        if shared or is_twin or (GROUP_ID in group and GROUP_ID in candidate):
            others = len(_overridden_otherwise(group, candidate))
            ranked.append((shared > 0, not others, shared, is_twin, -others, -index))
    return -max(ranked)[-1] if ranked else None


def _is_of_same_optimizer(group: Mapping[str, Any], candidate: Mapping[str, Any]) -> bool:
    writers = writers_of(candidate)
    # settings of several classes of one form are taken for those of the most likely one only if
    # megatron-core wrote them
    is_known = len(writers) == 1 or is_identified(candidate)
    return is_known and optimizer_of(group) == writers[0]


def _is_twin(group: Mapping[str, Any], candidate: Mapping[str, Any]) -> bool:
    """Return whether both are called alike; groups of megatron-core are called by its keys."""
    if GROUP_ID in group and GROUP_ID in candidate:
        return identity_of(group) == identity_of(candidate)
    is_alike = _keys(group, group) == _keys(candidate, group)
    return is_alike and _is_of_same_optimizer(group, candidate)


def _identifiers() -> tuple[str, ...]:
    return tuple(require_upstream("param_group_identifier_keys"))


def _keys(group: Mapping[str, Any], present: Mapping[str, Any]) -> list[Any]:
    """Return megatron-core's keys of a group; a group without an optimizer's name fits any."""
    # NeMo writes these names with a prefix
    values = {key: group.get(key, group.get(f"pre_{key}")) for key in _identifiers()}
    if values["optimizer"] is None:
        values["optimizer"] = present.get("optimizer")
    return list(values.values())


def _name(group: Mapping[str, Any]) -> str:
    if GROUP_ID in group:
        return identity_of(group)
    return ", ".join(f"{k}={group[k]}" for k in _identifiers() if group.get(k) is not None)
