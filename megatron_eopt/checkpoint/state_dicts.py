"""Matches torch's state dicts with an optimizer: which saved value each parameter continues from.

Everything is checked before anything is loaded. Parameters are matched by name. State dicts without
names, as torch writes them, are matched by the order of their parameters.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from megatron.core.utils import log_single_rank
from torch import Tensor
from torch.utils._pytree import tree_map_only

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MOMENTUM_SCALE, STEP
from megatron_eopt.base.nested_state import leaves, put
from megatron_eopt.checkpoint.continuation import (
    Continuation,
    LoadReport,
    Policy,
    Reader,
    SavedState,
    log_notes,
)
from megatron_eopt.checkpoint.saved_groups import (
    PARAM_NAMES,
    Groups,
    find_group,
    has_names,
    identity_of,
    is_identified,
    match_all,
    merged_optimizers,
    optimizer_of,
    state_in,
    with_names,
    writers_of,
)
from megatron_eopt.config.registry import meanings_of
from megatron_eopt.optimizers.update_rule import OF_GROUPS, UpdateRule, set_step
from megatron_eopt.routing.groups import GROUP_ID
from megatron_eopt.routing.plain_names import match_names

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A parameter whose state is loaded."""

    param: Tensor
    name: str
    reader: Reader  # its optimizer
    keys: frozenset[str]  # of its state, without the step count
    spare: frozenset[str]  # keys that a checkpoint may lack
    counts: bool  # whether its state has a step count


def targets_of(
    groups: Groups,
    names: Sequence[Sequence[str]],
    update_rules: Iterable[UpdateRule],
    state: Mapping[Tensor, Mapping[str, Any]],
) -> list[list[Target]]:
    """Return the targets of each group, given the names of its parameters."""
    rule_of = {param: rule for rule in update_rules for param in rule.params}
    targets: list[list[Target]] = []
    for group, of_group in zip(groups, names, strict=True):
        targets.append([])
        for param, name in zip(group["params"], of_group, strict=True):
            rule = rule_of[param]
            reader = Reader.of(rule.name, group)
            keys = frozenset(key for key in state[param] if not is_users(reader.name, key))
            wanted, spare = keys - {STEP, MOMENTUM_SCALE}, rule.optional_state
            targets[-1].append(Target(param, name, reader, wanted, spare, STEP in keys))
    return targets


def is_users(optimizer: str, key: str) -> bool:
    """Whether a key of a parameter's state is not the optimizer's, so that a user has added it."""
    keys = meanings_of(optimizer).keys()
    # keys of nested state, and of a weight's matrices, are paths
    words = set(key.split("/"))
    return bool(keys) and words.isdisjoint(keys | {STEP, MOMENTUM_SCALE, OF_GROUPS})


@dataclass(frozen=True)
class Loaded:
    """What to load into one parameter's state."""

    values: Mapping[str, Any]  # saved values by key, with the step count if there is one
    factors: Mapping[str, float]  # what a value is multiplied by, if it is converted
    starts_fresh: bool  # whether all its state starts anew
    of_user: Mapping[str, Any]  # saved values that no optimizer knows, by key

    @classmethod
    def by(
        cls, outcome: Continuation, values: Mapping[str, Any], of_user: Mapping[str, Any]
    ) -> Self:
        """Return what a decision about a parameter lets it load."""
        factors = {key: o.factor for key, o in outcome.origins.items() if o.factor != 1.0}
        return cls(values, factors, bool(outcome.fresh) and not outcome.origins, of_user)

    def converted(self) -> dict[str, Any]:
        """Return the values after their conversion."""
        return {k: v * self.factors[k] if k in self.factors else v for k, v in self.values.items()}

    def write(self, state: dict[str, Any], copy: Callable[[Tensor, Any], Tensor]) -> None:
        """Write checked values into a parameter's state, whose containers exist.

        Args:
            state: The state.
            copy: Called with a tensor of the state and its saved value; copies, and returns the
                tensor that holds this rank's elements.
        """
        self.write_of_user(state)
        if self.starts_fresh:
            set_step(state, 0)
        for key, value in self.values.items():
            if key == STEP:
                set_step(state, int(value))
                continue
            saved = dict(leaves(value, (key,)))
            for path, current in list(leaves(state[key], (key,))):
                if isinstance(current, Tensor):
                    copy(current, saved[path]).mul_(self.factors.get(key, 1.0))
                else:
                    put(state, path, type(current)(saved[path]))

    def write_of_user(self, state: dict[str, Any]) -> None:
        """Copy what a user has added into a parameter's state."""
        state.update(tree_map_only(Tensor, lambda v: v.detach().clone(), dict(self.of_user)))


def named(state_dict: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a torch state dict with the names of its parameters, given for each group.

    Each group also has a hash of its names, because torch may merge groups and drop names.
    """
    groups = state_dict["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    flat = [name for of_group in names for name in of_group]
    optimizers = sorted({name for group in groups if (name := optimizer_of(group))})
    hashed = [with_names(g, each, optimizers) for g, each in zip(groups, names, strict=True)]
    given = dict(zip(numbers, flat, strict=True))
    return {**state_dict, PARAM_NAMES: given, "param_groups": hashed}


class StateDictMatch:
    """A torch state dict, matched with the groups of an optimizer.

    Args:
        state_dict: A mapping with ``state`` and ``param_groups``.
        groups: The optimizer's groups.
        targets: The parameters of each group, in order.

    Raises:
        ConfigurationError: If groups or parameters do not match.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Any],
        groups: Groups,
        targets: Sequence[Sequence[Target]],
    ) -> None:
        saved = _with_settings(_groups_of(state_dict), groups)
        self._state: Mapping[Any, Mapping[str, Any]] = state_dict["state"]
        self._targets = [target for of_group in targets for target in of_group]
        self._unnamed: Groups = ()  # groups of another package, matched by order
        self._group_of = {number: group for group in saved for number in group["params"]}
        # torch's distributed checkpoints have names in place of numbers
        is_named = all(isinstance(number, str) for number in self._group_of)
        given: Mapping[Any, str] | None = state_dict.get(PARAM_NAMES)
        saved_numbers = {name: number for number, name in (given or {}).items()}
        if given is None and is_named:
            saved_numbers = {number: number for number in self._group_of}
        matched = match_names((target.name for target in self._targets), saved_numbers)
        if given is not None or not self._targets or matched:
            self._numbers = {name: saved_numbers[other] for name, other in matched.items()}
        elif is_named:
            # torch has put them in this optimizer's order, under names of a wrapper
            self._numbers = _by_order(saved, range(len(groups)), targets)
        else:
            order = _in_order(saved, groups)
            self._unnamed = () if all(map(is_identified, saved)) else saved
            self._numbers = _by_order(saved, order, targets)
            for index, of_group in zip(order, targets, strict=True):
                if not has_names(saved[index], (t.name for t in of_group)):
                    raise _of_others(saved[index])
            text = "the state dict does not name its parameters: they are matched by order"
            log_single_rank(logger, logging.INFO, text)
        # names as they were saved, and as they are here; a wrapper may have come or gone since
        both = [{n: name for name, n in each.items()} for each in (saved_numbers, self._numbers)]
        here = both[1]
        named = [
            {**group, PARAM_NAMES: [here[n] for n in group["params"] if n in here]}
            for group in saved
        ]
        self.members = {
            identity_of(group): [target.name for target in of_group]
            for group, of_group in zip(groups, targets, strict=True)
        }
        twins = [find_group(group, named, self.members) for group in groups]
        if len({*map(optimizer_of, groups)}) > 1 and not all(map(is_identified, saved)):
            # one torch optimizer's settings are not for one of several here
            twins = [None for _ in groups]
        # the matching group of the state dict for each group, None if it has none
        self.twins = [None if index is None else saved[index] for index in twins]
        # once for each group, because this reads the names of all its parameters
        self._merged = {
            id(group): merged_optimizers(
                group, ([of.get(number, str(number)) for number in group["params"]] for of in both)
            )
            for group in saved
        }

    def number_of(self, name: str) -> Any:
        """Return the key of a parameter in the state dict; None if it is not in it."""
        return self._numbers.get(name)

    def load(
        self,
        policy: Policy,
        problem_with: Callable[[Target, str, Any], str | None],
        *,
        has_stepped: bool,
    ) -> dict[Tensor, Loaded]:
        """Return what to load into each parameter's state.

        Args:
            policy: What may differ.
            problem_with: Called with a target, a key of its state and a saved value. Returns why
                the value cannot be loaded there, or None.
            has_stepped: Whether the optimizer has stepped, so that its state cannot start fresh.

        Raises:
            ConfigurationError: If state is missing, has another shape, or cannot start fresh.
        """
        loads: dict[Tensor, Loaded] = {}
        report = LoadReport(policy)
        for target in self._targets:
            name, reader, keys = target.name, target.reader, target.keys
            number = self.number_of(name)
            values = _by_path(self._state.get(number, {}), keys)
            saved = self._saved_state(number, values.keys() - {STEP}, reader.name)

            def misfit(
                key: str, other: str, target: Target = target, values: Any = values
            ) -> str | None:
                if getattr(values[other], "is_meta", False):
                    return "is on the meta device, without values"
                problem = problem_with(target, key, values[other])
                if problem and self._unnamed:
                    # what fits may then be another parameter's, too
                    raise _unnamed(self._unnamed, f"{target.name}: {key} {problem}")
                return problem

            writers = saved.optimizers
            outcome = report.decide(name, reader, keys, saved, misfit, target.spare)
            taken = {key: values[origin.key] for key, origin in outcome.origins.items()}
            # moments and their count belong together
            if target.counts and not outcome.fresh:
                # fused classes count in groups
                counted = values if STEP in values else self._group_of.get(number, {})
                if STEP in counted:
                    taken[STEP] = counted[STEP]
                    # other optimizers count in other types
                    is_anothers = saved.is_anothers(reader)
                    if not is_anothers and (problem := problem_with(target, STEP, taken[STEP])):
                        report.lack(name, STEP, problem)
                elif taken and STEP not in target.spare:
                    report.lack(name, STEP)
            of_user = {
                key: value
                for key, value in values.items()
                if key not in keys and all(is_users(writer, key) for writer in writers)
            }
            loads[target.param] = Loaded.by(outcome, taken, of_user if writers else {})
        report.refuse("state_dict", has_stepped=has_stepped)
        log_notes(report.notes)
        return loads

    def _saved_state(self, number: Any, keys: set[str], reader: str) -> SavedState:
        group = self._group_of.get(number)
        if group is None or not keys:
            return SavedState(frozenset(keys))
        merged = self._merged[id(group)] if isinstance(number, str) else None
        groups: Groups = [{**group, GROUP_ID: name} for name in merged or ()] or [group]
        return state_in(groups, keys, reader)


def _with_settings(saved: Groups, groups: Groups) -> Groups:
    """Return saved groups, with settings for those that torch has left without.

    torch gives the settings of a saved group to the last one of several groups that hold its
    parameters now. The identity still tells that other parameters had these settings.
    """
    with_settings = [group for group in saved if group.keys() > {"params"}]
    if len(saved) != len(groups) or not with_settings:
        return saved
    result = []
    for saved_group, group in zip(saved, groups, strict=True):
        donor = saved_group
        if donor.keys() == {"params"}:
            alike = (g for g in with_settings if optimizer_of(g) == optimizer_of(group))
            donor = next(alike, with_settings[0])
        result.append({**donor, "params": saved_group["params"]})
    return result


def _by_path(values: Mapping[str, Any], keys: Collection[str]) -> Mapping[str, Any]:
    """Return state with nested values by the paths of their leaves, if ``keys`` has these paths.

    State of whole matrices is saved so; emerging-optimizers' classes have lists of factors.
    """
    by_path = dict(values)
    for key in values.keys() & {key.partition("/")[0] for key in keys} - {*keys}:
        by_path |= {"/".join(path): leaf for path, leaf in leaves(by_path.pop(key), (key,))}
    return by_path


def _by_order(
    saved: Groups, order: Iterable[int], targets: Sequence[Sequence[Target]]
) -> dict[str, Any]:
    """Return the number of each parameter, given the index of each group in a state dict."""
    number_of: dict[str, Any] = {}
    for of_group, index in zip(targets, order, strict=True):
        numbers = saved[index]["params"] if index < len(saved) else []
        if len(numbers) != len(of_group):
            raise _another(saved, f"{len(numbers)} parameters of a group", len(of_group))
        number_of |= {target.name: n for target, n in zip(of_group, numbers, strict=True)}
    return number_of


def _groups_of(state_dict: Any) -> Groups:
    """Return the groups of a state dict.

    Raises:
        ConfigurationError: If it is no state dict of an optimizer.
    """
    is_whole = isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys()
    if not is_whole or not all("params" in group for group in state_dict["param_groups"]):
        has = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else state_dict
        rule = "must have the keys 'state' and 'param_groups', with the parameters of each group"
        hint = "Pass what the optimizer's state_dict() returned"
        raise ConfigurationError("state_dict", has, rule, hint)
    groups: Groups = state_dict["param_groups"]
    return groups


def _in_order(saved: Groups, groups: Groups) -> list[int]:
    """Return the index of each group's counterpart in a state dict without names."""
    if all(map(is_identified, saved)):
        return match_all(saved, groups)
    if len(saved) != len(groups):
        raise _another(saved, f"{len(saved)} parameter groups", len(groups))
    return list(range(len(groups)))


def _of_others(group: Mapping[str, Any]) -> ConfigurationError:
    rule = "its group was saved of other parameters than this run's, and they have no names here"
    hint = f"Keep the key {PARAM_NAMES!r} of what state_dict() returned"
    return ConfigurationError("state_dict", identity_of(group), rule, hint)


def _unnamed(saved: Groups, problem: str) -> ConfigurationError:
    writers = sorted({name for group in saved for name in writers_of(group)[:1]})
    return ConfigurationError(
        "state_dict",
        f"{len(saved)} parameter groups with the settings of {' and '.join(writers)}",
        f"does not name its parameters, and by order they do not fit: {problem}",
        "In your own loop, load it into an optimizer of the class that wrote it, and pass what "
        "torch's get_optimizer_state_dict(model, that_optimizer) returns to "
        "set_optimizer_state_dict. For torch.optim.Muon's momenta alone, use "
        "fsdp2.import_torch_muon",
    )


def _another(saved: Groups, has: str, wanted: int) -> ConfigurationError:
    if not all(map(is_identified, saved)):
        return _unnamed(saved, f"it has {has}, and not {wanted}")
    return ConfigurationError(
        "state_dict",
        has,
        f"does not match this rank, which needs {wanted} of them, with equal shapes",
        "Resume with the model, precision, optimizers and parallel layout of the run that wrote "
        "it, or from a torch_dist checkpoint",
    )
