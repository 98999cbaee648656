"""Parameter groups and step counts in checkpoints of this package, megatron-core and NeMo."""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STEP
from megatron_eopt.base.upstream import require_upstream
from megatron_eopt.config.registry import meanings_of, name_of_class
from megatron_eopt.optimizers.continuation import SavedState
from megatron_eopt.routing.groups import GROUP_ID

type Groups = Sequence[Mapping[str, Any]]

PARAM_NAMES = "param_names"
"""Key of the names of a saved group's parameters; torch uses it, too."""

BY_PARAMETER = "param_to_group_meta"
"""Key of the settings of groups by parameter, in ``fsdp_dtensor``."""

_SEPARATOR = "\t"
"""Between a saved group's identity, the hash of its parameters' names, and all optimizers' names.

torch's distributed checkpoints merge groups, keep no names beside parameters, and need the same
keys when they load. So these are parts of the identity.
"""

_SIGNATURES: tuple[tuple[str, set[str], set[str]], ...] = (
    ("soap", {"shampoo_beta"}, set()),
    ("adam", {"betas", "eps", "amsgrad"}, set()),
    ("adam", {"betas", "eps", "bias_correction"}, set()),
    ("lion", {"betas"}, {"eps"}),
    ("sgd", {"momentum", "dampening"}, set()),
    ("adaptive_muon", {"momentum", "beta2"}, set()),
    ("muon", {"momentum"}, {"betas"}),
)
"""Optimizers by the settings that a group has and lacks: megatron-core does not name the main one.
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
    """Return the registered name of the optimizer that wrote a group; None if it cannot be told."""
    identity = identity_of(group).partition("/")[0]
    # NeMo writes megatron-core's names with a prefix
    named = identity or group.get("optimizer") or group.get("pre_optimizer")
    if named:
        return name_of_class(str(named))
    keys = group.keys()
    fitting = (name for name, has, lacks in _SIGNATURES if has <= keys and not lacks & keys)
    return next(fitting, None)


class SavedGroups:
    """The parameter groups of a checkpoint, and which optimizer wrote each parameter's state.

    Args:
        groups: The groups. Checkpoints of this package name their parameters.
        ours: Names of the optimizers of this run, in case the checkpoint names no parameters.
    """

    def __init__(self, groups: Groups = (), ours: Collection[str] = ()) -> None:
        self.groups = groups
        self._group_of = {name: group for group in groups for name in group.get(PARAM_NAMES, ())}
        self._optimizer_of = {id(group): optimizer_of(group) for group in groups}
        named = filter(None, self._optimizer_of.values())
        self.optimizers = tuple(dict.fromkeys(named))
        self._is_alike = {*self.optimizers} == {*ours}

    def state_of(self, names: Sequence[str], keys: Collection[str], reader: str) -> SavedState:
        """Return what a checkpoint has of a parameter, given the ``keys`` of its saved state.

        ``names`` are the names under which the checkpoint may know the parameter, and ``reader`` is
        the optimizer that loads it.
        """
        group = next((self._group_of[name] for name in names if name in self._group_of), None)
        if group is not None:
            writer = self._optimizer_of[id(group)]
            optimizers: tuple[str, ...] = () if writer is None else (writer,)
        else:
            optimizers = fitting(self.optimizers, keys)
            if self._is_alike and reader in optimizers:
                # with the optimizers of this run, each parameter had the one that it has now
                optimizers = (reader,)
        # a mean becomes a sum by the writer's momentum, so it must be known without doubt
        momenta = {
            its.get("momentum")
            for its in ([group] if group is not None else self.groups)
            if (self._optimizer_of[id(its)],) == optimizers
        }
        momentum = momenta.pop() if len(momenta) == 1 else None
        return SavedState(frozenset(keys), optimizers, momentum)


def fitting(optimizers: Iterable[str], keys: Collection[str]) -> tuple[str, ...]:
    """Return which of some optimizers can have written state with these keys."""
    return tuple(
        name
        for name in optimizers
        if not (known := meanings_of(name).keys())
        # keys of nested state, and of a weight's matrices, are paths
        or all(known & set(key.split("/")) for key in keys)
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
    found: list[Mapping[str, Any]] = []
    for inner in map(inner_of, children_of(state)):
        # megatron-core stores one count beside the state, if all parameters have the same
        common = inner.get("state", {}).get("common_step")
        counted = {} if common is None else {STEP: common}
        found += [{**counted, **group} for group in inner.get("param_groups", ())]
    return found


def groups_in(state: Any) -> list[Mapping[str, Any]]:
    """Return all parameter groups of optimizers, wherever they are in a state dict."""
    if isinstance(state, Mapping) and isinstance(state.get("param_groups"), list):
        return saved_groups(state)
    parts = state.values() if isinstance(state, Mapping) else state
    is_container = isinstance(state, Mapping | list | tuple)
    return [group for part in parts for group in groups_in(part)] if is_container else []


def saved_steps(state: Any) -> int:
    """Return the step count, which is the same for all optimizers, from wherever it is stored."""
    found = [group.get(STEP) for group in saved_groups(state)]
    for inner in map(inner_of, children_of(state)):
        states = inner.get("state", {})
        each = (values.get(STEP) for key, values in states.items() if isinstance(key, int))
        found += [states.get("common_step"), inner.get(STEP), *each]
    return max((int(step) for step in found if step is not None), default=0)


def steps_of(groups: Groups, saved: Groups, otherwise: int) -> int:
    """Return the step count of the matching groups of a checkpoint.

    If all groups are new, because a flag or an override has changed, it is the count of groups of
    the same optimizer, else ``otherwise``.
    """
    twins = [saved[place] for group in groups if (place := find_group(group, saved)) is not None]
    names = set(map(optimizer_of, groups)) - {None}
    alike = [group for group in saved if optimizer_of(group) in names]
    for its in (twins, alike):
        if counts := [int(group[STEP]) for group in its if group.get(STEP) is not None]:
            return max(counts)
    return otherwise


def adopt(group: dict[str, Any], saved: Groups) -> None:
    """Load the settings of the matching group of a checkpoint, except those of the schedule.

    A group without a match keeps its settings; its parameters may have had another optimizer.
    """
    place = find_group(group, saved)
    if place is not None:
        take_settings(group, saved[place])


def take_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Load a group's settings, except those that describe or schedule this run's group."""
    # a load must not change the schedule, nor what megatron-core matches groups by
    keep = {"params", STEP, "default_config", GROUP_ID, "max_lr", "min_lr", *_identifiers()}
    # this run chooses torch's implementation and where it counts steps
    keep |= {PARAM_NAMES, "fused", "foreach", "capturable"}
    group.update({key: value for key, value in saved.items() if key not in keep})


def kind_of_group(group: Mapping[str, Any]) -> str:
    """Return a group's identity without the names of its rates, which flags may or may not set."""
    optimizer, experts, names, *label = f"{identity_of(group)}//".split("/")[:4]
    kept = [name for name in names.split("+") if name not in ("lr", "max_lr", "min_lr")]
    return "/".join((optimizer, experts, "+".join(kept), *label))


def match_all(saved: Groups, present: Groups) -> list[int]:
    """Return, for each present group, the index of the matching saved group.

    Raises:
        ConfigurationError: If the groups do not match one to one; names the groups that differ.
    """
    twins = [find_group(group, saved) for group in present]
    found = [place for place in twins if place is not None]
    if len(found) == len(present) == len(saved) == len(set(found)):
        return found
    lacking = [_name(group) for group, place in zip(present, twins, strict=True) if place is None]
    others = [_name(group) for place, group in enumerate(saved) if place not in found]
    rule = f"must have the parameter groups of this run, but it lacks {lacking} and has {others}"
    hint = "Resume with the optimizers and overrides of the run that wrote the checkpoint"
    raise ConfigurationError("state_dict", [_name(group) for group in saved], rule, hint)


def optimizers_of(groups: Groups) -> set[str | None]:
    """Return the optimizer names of some groups; None for a group that names none."""
    return {
        group.get("optimizer") or identity_of(group).partition("/")[0] or None for group in groups
    }


def find_group(group: Mapping[str, Any], saved: Groups) -> int | None:
    """Find a group by its identity, or by megatron-core's keys if megatron-core wrote it.

    A group of another optimizer never matches, because its settings mean other things.
    """
    mine = optimizer_of(group)
    for place, candidate in enumerate(saved):
        if optimizer_of(candidate) not in (None, mine):
            continue
        if GROUP_ID in group and GROUP_ID in candidate:
            if identity_of(group) == identity_of(candidate):
                return place
        elif _keys(group, group) == _keys(candidate, group):
            return place
    return None


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
