"""An update rule with the groups and the state of a torch optimizer that it updates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron_eopt.optimizers.lending import Lender
from megatron_eopt.optimizers.update_rule import ParamGroup, State, UpdateRule, ids_of


class AssignedRule:
    """An update rule with the groups and the state of a torch optimizer that it updates.

    Args:
        rule: The update rule.
        optimizer: The torch optimizer.
        places: Its groups there.
        is_shared: Whether other rules update other parameters of the same groups.
        lends: Whether the rule gets local tensors; see Note [Lent tensors] of lending.py.
    """

    def __init__(
        self,
        rule: UpdateRule,
        optimizer: Any,
        places: slice = slice(None),
        *,
        is_shared: bool = False,
        lends: bool = False,
    ) -> None:
        self.rule, self.optimizer, self.places = rule, optimizer, places
        self._is_shared = is_shared
        self._parts: list[list[Tensor]] | None = None  # the rule's parameters of shared groups
        self._seen: list[list[int]] = []  # the tensors of each group, by their ids
        self._lender = Lender(rule) if lends else None
        # keys that stand for the state that owners of matrices keep, in the order of shards
        self.stands: list[frozenset[str]] = []
        # for a rule of whole matrices, what was in the state for the parameters of the groups
        self._entries: dict[Tensor, dict[str, Any]] | None = None

    def attach(self) -> None:
        """Tell the update rule where the tensors that it steps are in the groups."""
        groups = self.optimizer.param_groups[self.places]
        self._seen = ids_of(groups)
        if self._is_shared:
            members = set(self.rule.params)
            self._parts = [[p for p in group["params"] if p in members] for group in groups]
        self.rule.attach(self.groups())

    def groups(self) -> list[ParamGroup]:
        """Return the groups, with only the rule's parameters, wherever users have moved these."""
        groups: list[ParamGroup] = self.optimizer.param_groups[self.places]
        if ids_of(groups) != self._seen:
            self.attach()
        if self._parts is None:
            return groups
        return [{**group, "params": p} for group, p in zip(groups, self._parts, strict=True)]

    @contextmanager
    def groups_and_state(self) -> Iterator[tuple[list[ParamGroup], State]]:
        """Provide what the update rule works on: groups of this rank's tensors, and their state."""
        if self.rule.counts_matrices:
            # users do not find the state of whole matrices by parameters
            self._follow_state()
        groups, state = self.groups(), self.optimizer.state
        if self._lender is None:
            yield groups, state
        else:
            with self._lender.lent(groups, state) as (groups, lent):
                yield groups, lent
        for group, part in zip(self.optimizer.param_groups[self.places], groups, strict=True):
            if part is not group:
                # some optimizers count steps in their groups, which are copies here
                group.update({key: value for key, value in part.items() if key != "params"})

    def _follow_state(self) -> None:
        """Let the update rule know what users have cleared or replaced in the state."""
        before, state = self.rule.owned_state, self.optimizer.state
        now = {param: state[param] for param in before}
        # who makes new dictionaries of all values, for example on another device, clears nothing
        is_rebuilt = any(values and values is not before[param] for param, values in now.items())
        before |= now
        for number in self._cleared():
            if not is_rebuilt:
                self.rule.forget_state(number)

    def _cleared(self) -> Sequence[int]:
        """Return the shards whose state users have cleared."""
        state = self.optimizer.state
        if self._lender is not None:
            # no keys are left that stand for owners' state
            cleared = []
            stands = zip(self.rule.params, self.stands, strict=False)
            for number, (param, names) in enumerate(stands):
                if names and names.isdisjoint(state[param]):
                    cleared.append(number)
                    state[param].update(dict.fromkeys(names))
            return cleared
        numbers = {param: number for _, param, number in self.rule.numbered(self.groups())}
        # an owner may store nothing of its matrices, and clear all that it has
        groups = self.optimizer.param_groups
        watched = numbers or [param for group in groups for param in group["params"]]
        before, now = self._entries, {param: state[param] for param in watched}
        self._entries = now
        if before is None:
            return ()
        replaced = [param for param in watched if now[param] is not before.get(param)]
        if replaced and len(replaced) == len(now):
            return range(len(self.rule.shards))
        return [numbers[param] for param in replaced if param in numbers]
