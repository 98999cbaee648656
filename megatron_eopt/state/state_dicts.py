"""Matches torch's state dicts with an optimizer: which saved value each parameter continues from.

Everything is checked before anything is loaded. Parameters are matched by name. State dicts without
names, as torch writes them, are matched by order where all numbers and shapes agree.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.log import warn
from megatron_eopt.base.names import MOMENTUM_SCALE, STEP
from megatron_eopt.base.nested_state import leaves, put
from megatron_eopt.optimizers.update_rule import UpdateRule, set_step
from megatron_eopt.routing.groups import GROUP_ID
from megatron_eopt.routing.plain_names import match_names
from megatron_eopt.state.groups import (
    PARAM_NAMES,
    Groups,
    Members,
    find_groups,
    has_names,
    is_identified,
    match_all,
    merged_writers,
    with_names,
)
from megatron_eopt.state.rule import (
    LoadReport,
    SavedState,
    Writer,
    identity_of,
    kinds_by_optimizer,
    log_lines,
    optimizer_of,
)

logger = logging.getLogger(__name__)

type Loads = Mapping[Tensor, Mapping[str, Any] | None]
"""What to load into each parameter's state, by key; None if it starts fresh."""


def named(state_dict: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a torch state dict with the names of its parameters, given for each group.

    Each group also has a hash of its names, because torch may merge groups and drop names.
    """
    groups = state_dict["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    flat = [name for of_group in names for name in of_group]
    optimizers = sorted({str(writer) for group in groups if (writer := Writer.of(group)).is_named})
    hashed = [with_names(g, each, optimizers) for g, each in zip(groups, names, strict=True)]
    given = dict(zip(numbers, flat, strict=True))
    return {**state_dict, PARAM_NAMES: given, "param_groups": hashed}


class SavedStateDict(NamedTuple):
    """A state dict by names of parameters: this run's, or those that only the state dict has."""

    state: Mapping[str, Mapping[str, Any]]  # values by name
    groups: Groups  # each with the names of its parameters
    writers: Mapping[str, tuple[Writer, ...]]  # who may have written each parameter's state
    left_out: frozenset[str] = frozenset()  # names that have state, and are not of this run
    is_by_order: bool = False  # whether it has no names

    @classmethod
    def of(
        cls,
        state_dict: Any,
        groups: Groups,
        names: Sequence[Sequence[str]],
        others: Iterable[str] = (),
    ) -> "SavedStateDict":
        """Return a state dict by names.

        Args:
            state_dict: A mapping with ``state`` and ``param_groups``.
            groups: The optimizer's groups.
            names: Names of each group's parameters.
            others: Names of the parameters of other optimizers, which it may have, too.

        Raises:
            ConfigurationError: If it is no state dict, or has no names and another number of
                groups or parameters.
        """
        saved = _with_settings(_groups_of(state_dict), groups)
        own = [*(name for of_group in names for name in of_group), *others]
        key_of, given = _given_names(state_dict, saved, own)
        is_by_order = given is None and any(group["params"] for group in saved)
        if given is None:
            here = _by_order(saved, groups, names)
        else:
            back = {theirs: name for name, theirs in match_names(own, given.values()).items()}
            here = {number: back.get(name, name) for number, name in given.items()}
        _check_names(saved, state_dict["state"], key_of, here)
        unnamed = [Writer.of(group) for group in saved if not is_identified(group)]
        writers: dict[str, tuple[Writer, ...]] = {}
        with_own: list[Mapping[str, Any]] = []
        for group in saved:
            of_group = [key_of(number) for number in group["params"]]
            ours = [here[number] for number in of_group]
            theirs = [(given or here)[number] for number in of_group]
            merged = merged_writers(group, (theirs, ours)) or (Writer.of(group),)
            if not is_identified(group):
                # torch may have given it parameters of another optimizer; their state tells
                merged = tuple(dict.fromkeys((*merged, *unnamed)))
            writers |= dict.fromkeys(ours, merged)
            with_own.append({**group, PARAM_NAMES: ours})
        state: dict[str, dict[str, Any]] = {}
        for key, values in state_dict["state"].items():
            # torch's distributed checkpoints add what is no tensor under a word, beside the number
            if (number := key_of(key)) in here:
                state.setdefault(here[number], {}).update(values)
        if not any(state.values()) and not any(GROUP_ID in group for group in saved):
            # torch's optimizers create state in their first step
            writers = {}
        return cls(state, with_own, writers, frozenset(state.keys() - {*own}), is_by_order)

    def __or__(self, other: "SavedStateDict") -> "SavedStateDict":  # type: ignore[override]
        """Return the state of two optimizers of a chain."""
        state, writers = {**self.state, **other.state}, {**self.writers, **other.writers}
        left_out = self.left_out | other.left_out
        return SavedStateDict(state, [*self.groups, *other.groups], writers, left_out)

    def twins(self, groups: Groups, members: Members) -> list[Mapping[str, Any] | None]:
        """Return the saved group that each group's settings continue from, None without."""
        if len({*map(optimizer_of, groups)}) > 1 and not all(map(is_identified, self.groups)):
            # one torch optimizer's settings are not for one of several here
            return [None for _ in groups]
        found = find_groups(groups, self.groups, members)
        return [None if index is None else self.groups[index] for index in found]

    def loads(
        self,
        groups: Groups,
        names: Sequence[Sequence[str]],
        rules: Iterable[UpdateRule],
        kinds: Mapping[Tensor, Collection[str]],
        state: Mapping[Tensor, Mapping[str, Any]],
        misfit: Callable[[Tensor, str, Any], str | None],
        *,
        has_stepped: bool,
        found: bool | None = None,
    ) -> Loads:
        """Return what to load into the state of each parameter; see Note [Load rule].

        Args:
            groups: The optimizer's groups.
            names: Names of each group's parameters.
            rules: Its update rules.
            kinds: Keys of each parameter's state that its optimizer makes.
            state: The state.
            misfit: Called with a parameter, a key of its state and a saved value. Returns why the
                value cannot be loaded there, or None.
            has_stepped: Whether the optimizer has stepped.
            found: Whether the state dict has any parameter of all optimizers; None for this one.

        Raises:
            ConfigurationError: If state is missing, does not fit, or cannot start fresh.
        """
        rule_of = {param: rule for rule in rules for param in rule.params}
        report = LoadReport()
        result: dict[Tensor, Mapping[str, Any] | None] = {}
        params = [
            (param, name, Writer.of(group, rule_of[param].name))
            for group, of_group in zip(groups, names, strict=True)
            for param, name in zip(group["params"], of_group, strict=True)
        ]
        count_of = {name: g.get(STEP) for g in self.groups for name in g[PARAM_NAMES]}
        own = kinds_by_optimizer(
            (str(reader.name), tuple(_kinds(kinds[param]))) for param, _, reader in params
        )
        for param, name, reader in params:
            optional = rule_of[param].optional_state
            values = _by_path(self.state.get(name, {}), kinds[param])

            def misfit_of(kind: str, param: Tensor = param, values: Any = values) -> str | None:
                if getattr(values[kind], "is_meta", False):
                    return "is on the meta device, without values"
                return misfit(param, kind, values[kind])

            saved = SavedState(_kinds(values), self.writers.get(name, ()))
            if len(saved.writers) > 1:
                saved = saved.by(own)
            required = _kinds(kinds[param]) - optional
            if not report.continues(name, reader, required, misfit_of, saved):
                result[param] = None
                continue
            result[param] = values
            for key in values.keys() & kinds[param]:
                was, now = (getattr(it, "dtype", None) for it in (values[key], state[param][key]))
                if now == torch.float32 and was not in (None, now):
                    report.note(f"{key} is converted from {was} to {now}", name)
            if STEP in kinds[param]:
                # fused classes count in groups
                count = values.get(STEP, count_of.get(name))
                if count is not None:
                    result[param] = {**values, STEP: count}
                    if not _is_count(count):
                        report.lack(name, f"{STEP} is no number of steps")
                elif required and STEP not in optional:
                    report.lack(name, f"no {STEP}")
        for name in self.left_out:
            report.note("is left out: no optimizer of this run steps it", name)
        if self.is_by_order and report.lacks:
            raise _unnamed(report.lacks)
        # of an optimizer that has not stepped, nothing is lost
        found = True if not self.writers and self.groups else found
        report.refuse("state_dict", has_stepped=has_stepped, found=found)
        log_lines(report.lines)
        return result


def write_state(
    state: dict[str, Any], values: Mapping[str, Any], copy: Callable[[Tensor, Any], object]
) -> None:
    """Write loaded values into a parameter's state, whose containers exist.

    Args:
        state: The state.
        values: By key; those that the state does not have are the user's, and are copied.
        copy: Called with a tensor of the state and its saved value; copies this rank's elements.
    """
    for key, value in values.items():
        if key == STEP:
            set_step(state, int(value))
        elif key not in state:
            state[key] = tree_map_only(Tensor, lambda v: v.detach().clone(), value)
        else:
            saved = dict(leaves(value, (key,)))
            for path, current in list(leaves(state[key], (key,))):
                if isinstance(current, Tensor):
                    copy(current, saved[path])
                else:
                    put(state, path, type(current)(saved[path]))


def _number(key: Any) -> Any:
    """Return a parameter's number, or its name; files may have numbers as words."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _given_names(
    state_dict: Mapping[str, Any], saved: Groups, own: Sequence[str]
) -> tuple[Callable[[Any], Any], dict[Any, str] | None]:
    """Return what turns a state dict's keys into those of its names, and its names, if any."""
    raw = [number for group in saved for number in group["params"]]
    # what went through a file may have words in place of numbers
    by_number = {_number(key): str(name) for key, name in state_dict.get(PARAM_NAMES, {}).items()}
    if by_number:
        return _number, by_number
    # torch's optimizers over named parameters have names in their groups
    in_groups = [str(name) for group in saved for name in group.get(PARAM_NAMES, ())]
    if in_groups and len(in_groups) == len(raw):
        return _number, dict(zip(map(_number, raw), in_groups, strict=True))
    # torch's distributed checkpoints have names in place of numbers, which may look like numbers
    if all(isinstance(number, str) for number in raw):
        are_numbers = all(map(str.isdecimal, raw)) and not match_names(own, raw)
        if not are_numbers:
            return str, {name: name for name in raw}
    return _number, None


def _check_names(
    saved: Groups, state: Mapping[Any, Any], key_of: Callable[[Any], Any], here: Mapping[Any, str]
) -> None:
    """Raise a ConfigurationError unless each parameter in it has a name of its own."""
    numbers = [key_of(number) for group in saved for number in group["params"]]
    nameless = [number for number in numbers if number not in here]
    nameless += [key for key in state if isinstance(key, int) and key not in numbers]
    twice = [name for name, count in Counter(here.values()).items() if count > 1]
    if nameless or twice:
        what = (
            f"parameters {nameless[:4]} have no name" if nameless else f"two are called {twice[0]}"
        )
        hint = f"Keep the key {PARAM_NAMES!r} of what state_dict() returned as it was"
        raise ConfigurationError("state_dict", PARAM_NAMES, f"{what}, or are in no group", hint)


def _kinds(keys: Iterable[str]) -> frozenset[str]:
    return frozenset(keys) - {STEP, MOMENTUM_SCALE}


def _with_settings(saved: Groups, groups: Groups) -> Groups:
    """Return saved groups, with settings for those that torch has left without.

    torch gives the settings of a saved group to the last one of several groups that hold its
    parameters now. The identity still tells that other parameters had these settings.
    """
    donor = next((group for group in saved if group.keys() > {"params"}), None)
    if len(saved) != len(groups) or donor is None:
        return saved
    return [{**donor, **group} if group.keys() == {"params"} else group for group in saved]


def _by_path(values: Mapping[str, Any], keys: Collection[str]) -> Mapping[str, Any]:
    """Return state with nested values by the paths of their leaves, if ``keys`` has these paths.

    State of whole matrices is saved so; emerging-optimizers' classes have lists of factors.
    """
    by_path = dict(values)
    for key in values.keys() & {key.partition("/")[0] for key in keys} - {*keys}:
        by_path |= {"/".join(path): leaf for path, leaf in leaves(by_path.pop(key), (key,))}
    return by_path


def _by_order(saved: Groups, groups: Groups, names: Sequence[Sequence[str]]) -> dict[Any, str]:
    """Return the name of each number in a state dict without names, group by group.

    Raises:
        ConfigurationError: If the numbers of groups or parameters differ, or the groups say that
            they had other parameters.
    """
    order = list(range(len(saved)))
    if all(map(is_identified, saved)):
        order = match_all(saved, groups)
    elif len(saved) != len(groups):
        raise _unnamed(f"it has {len(saved)} parameter groups, and this optimizer {len(groups)}")
    here: dict[Any, str] = {}
    for index, of_group in zip(order, names, strict=True):
        numbers = list(map(_number, saved[index]["params"]))
        if len(numbers) != len(of_group):
            raise _unnamed(f"a group has {len(numbers)} parameters, and here {len(of_group)}")
        if not has_names(saved[index], of_group, in_order=True):
            raise _unnamed(f"{identity_of(saved[index])} was saved of other parameters")
        here |= dict(zip(numbers, of_group, strict=True))
    text = "the state dict does not name its parameters: they are matched by order"
    warn(logger, text)
    return here


def _unnamed(problem: str) -> ConfigurationError:
    return ConfigurationError(
        "state_dict",
        "without names of parameters",
        f"must fit by order then, but does not: {problem}",
        f"Keep the key {PARAM_NAMES!r} of what state_dict() returned. For another optimizer's "
        "state, load it into an optimizer of the class that wrote it, and pass what torch's "
        "get_optimizer_state_dict(model, that_optimizer) returns to set_optimizer_state_dict",
    )


def _groups_of(state_dict: Any) -> Groups:
    """Return the groups of a state dict.

    Raises:
        ConfigurationError: If it is no state dict of an optimizer.
    """
    is_whole = isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()
    if not is_whole or not _has_form(state_dict):
        has = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else state_dict
        rule = "must have the keys 'state' and 'param_groups', with the parameters of each group"
        hint = "Pass what the optimizer's state_dict() returned"
        raise ConfigurationError("state_dict", has, rule, hint)
    groups: Groups = state_dict["param_groups"]
    return groups


def _has_form(state_dict: Mapping[str, Any]) -> bool:
    """Return whether the parts of a state dict are of the types that torch's have."""
    state, groups = state_dict["state"], state_dict["param_groups"]
    return (
        isinstance(state, Mapping)
        and all(isinstance(values, Mapping) for values in state.values())
        and isinstance(groups, list | tuple)
        and all(isinstance(group, Mapping) for group in groups)
        and all(isinstance(group.get("params"), list | tuple) for group in groups)
        and isinstance(state_dict.get(PARAM_NAMES, {}), Mapping)
    )


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta:
            return False
        value = value.item()
    return isinstance(value, int | float) and math.isfinite(value)


def misfit_of(value: Any, own: Any, key: str) -> str | None:
    """Return why a saved value, which may be nested, cannot be loaded into ``own``; or None."""
    saved = dict(leaves(value, (key,)))
    for path, mine in leaves(own, (key,)):
        its = saved.get(path)
        if isinstance(mine, Tensor):
            try:
                its = torch.as_tensor(its)
            except (TypeError, ValueError, RuntimeError):
                return f"is of type {type(its).__name__}, and must be a tensor"
            # sides of 1 may differ, as between counters of shape () and (1,)
            if [n for n in its.shape if n != 1] != [n for n in mine.shape if n != 1]:
                return f"of shape {tuple(its.shape)} must have shape {tuple(mine.shape)}"
            if mine.is_floating_point() > its.is_floating_point() or its.layout != torch.strided:
                return f"of {its.dtype}, {its.layout}, must be a dense tensor of real numbers"
        elif isinstance(its, Mapping | list | tuple) or its is None:
            return f"is of type {type(its).__name__}, and must be {type(mine).__name__}"
    return None
