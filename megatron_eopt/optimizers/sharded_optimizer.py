"""One torch optimizer over what this rank stores of the parameters, whatever the storage.

Parameter groups and state are those of any torch optimizer. Schedulers, checkpoints and hooks may
change their values at any time, and the next step uses the new ones.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.gpu import SideStream
from megatron_eopt.optimizers.host_memory import OffloadSettings
from megatron_eopt.optimizers.lending import Lender
from megatron_eopt.optimizers.update_rule import (
    ParamGroup,
    State,
    UpdateRule,
    fixed,
    loss_of,
    refuse_copy,
    refuse_group,
)

type Served = Sequence[tuple[UpdateRule, slice]]
"""Each update rule with the slice of groups that it updates."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps update rules, in one order on all ranks; Megatron's wrappers may wrap it.

    If Megatron's wrapper replaces parameters, :meth:`Storage.serve` follows. Then call
    :meth:`init_state`.

    Args:
        groups: The parameter groups of all update rules.
        served: What each update rule updates.
        params: The parameters in the order of the model.
    """

    lends = False  # whether update rules get local tensors; see Note [Lent tensors] of lending.py

    def __init__(
        self, groups: Sequence[ParamGroup], served: Served, params: Iterable[Tensor]
    ) -> None:
        # torch needs a group, but a pipeline stage without experts may have none
        self._complete = False
        super().__init__([{"params": []}], {})
        self.param_groups = list(groups)
        self.update_rules = [update_rule for update_rule, _ in served]
        self._places = dict(served)
        shard_of = {shard.param: shard for rule in self.update_rules for shard in rule.shards}
        self.shards = [shard_of[param] for param in params if param in shard_of]
        self.names: dict[Tensor, str] = {}  # of the tensors that are stepped
        # what lends update rules their tensors, and parts of groups that they share
        self._lenders = {rule: Lender(rule) for rule in self.update_rules} if self.lends else {}
        self._parts: dict[UpdateRule, list[list[Tensor]]] = {}
        self._seen: list[list[int]] = []  # the tensors of each group, by their ids
        # of the main optimizer: what schedulers such as OneCycleLR look up
        self.defaults = {k: v for g in self.param_groups[:1] for k, v in g.items() if k != "params"}
        # for each rule of whole matrices, what was in `state` for the parameters of the groups
        self._entries: dict[UpdateRule, dict[Tensor, dict[str, Any]]] = {}
        self._side = SideStream()
        self._complete = True
        self.attach()

    def attach(self) -> None:
        """Take up which tensors are stepped, and tell update rules where they are in the groups."""
        self.names = {shard.main: shard.name for shard in self.shards if shard.main is not None}
        self._seen = self._ids()
        places = list(self._places.values())
        for update_rule, own in self._places.items():
            groups = self.param_groups[own]
            if places.count(own) > 1:
                members = set(update_rule.params)
                parts = [[p for p in group["params"] if p in members] for group in groups]
                self._parts[update_rule] = parts
                groups = [{"params": its} for its in parts]
            update_rule.attach(groups)

    def init_state(self) -> None:
        """Create the state of every parameter, so that it can be saved and loaded."""
        for update_rule in self.update_rules:
            with self.groups_and_state(update_rule) as (groups, state):
                update_rule.init(groups, state)
            # the same dictionaries, for code that clears all state or moves it to another device
            self.state.update(update_rule.owned_state)

    def off_load(self, settings: OffloadSettings) -> None:
        """Keep a fraction of weights and state in host memory from now on."""
        for update_rule in self.update_rules:
            outer = [param for group in self.groups_of(update_rule) for param in group["params"]]
            with self.groups_and_state(update_rule) as (groups, state):
                stepped = [param for group in groups for param in group["params"]]
                pairs = zip(outer, stepped, strict=True)
                movable = frozenset(its for param, its in pairs if param in settings.movable)
                update_rule.off_load(groups, state, replace(settings, movable=movable))

    def refuse_faults(self) -> None:
        """Raise a ConfigurationError if an optimizer cannot start from this rank's weights."""
        for update_rule in self.update_rules:
            for weight, reason in update_rule.faults:
                rule = f"cannot start from {weight}: {reason}"
                hint = "Initialize this weight accordingly before building the optimizer"
                raise ConfigurationError("optimizer", update_rule.name, rule, hint)

    def groups_of(self, update_rule: UpdateRule) -> list[ParamGroup]:
        """Return the groups that an update rule updates, with only its own parameters."""
        groups = self.param_groups[self._places[update_rule]]
        # several rules may update parts of one group
        held = self._parts.get(update_rule)
        if held is None:
            return groups
        return [{**group, "params": its} for group, its in zip(groups, held, strict=True)]

    @contextmanager
    def groups_and_state(self, update_rule: UpdateRule) -> Iterator[tuple[list[ParamGroup], State]]:
        """Provide what an update rule works on: groups of this rank's tensors, and their state."""
        self.take_up_state(update_rule)
        groups, lender = self.groups_of(update_rule), self._lenders.get(update_rule)
        if lender is None:
            yield groups, self.state
        else:
            with lender.lent(groups, self.state) as (groups, state):
                yield groups, state
        outer = self.param_groups[self._places[update_rule]]
        if groups is not outer:
            for group, part in zip(outer, groups, strict=True):
                # some optimizers count steps in their groups, which are copies here
                group.update({key: value for key, value in part.items() if key != "params"})

    def take_up_state(self, update_rule: UpdateRule) -> None:
        """Let an update rule know what users have cleared or replaced in :attr:`state`."""
        before = update_rule.owned_state
        now = {param: self.state[param] for param in before}
        # who makes new dictionaries of all values, for example on another device, clears nothing
        is_rebuilt = any(values and values is not before[param] for param, values in now.items())
        before |= now
        for number in self._cleared(update_rule):
            if not is_rebuilt:
                update_rule.forget_state(number)

    def _cleared(self, update_rule: UpdateRule) -> Sequence[int]:
        """Return the shards whose parameters have had their entry of :attr:`state` replaced.

        Only rules of whole matrices need it, whose state users do not find by parameters.
        """
        if not update_rule.counts_matrices:
            return ()
        numbers = {p: n for _, p, n in update_rule.numbered(self.groups_of(update_rule))}
        # an owner may store nothing of its matrices, and clear all that it has
        watched = numbers or [param for group in self.param_groups for param in group["params"]]
        now = {param: self.state[param] for param in watched}
        before = self._entries.get(update_rule)
        self._entries[update_rule] = now
        if before is None:
            return ()
        cleared = [param for param in watched if now[param] is not before.get(param)]
        if cleared and len(cleared) == len(now):
            return range(len(update_rule.shards))
        return [numbers[param] for param in cleared if param in numbers]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise a ConfigurationTypeError, because copies could not step."""
        refuse_copy(self)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group during construction; raise a ConfigurationError afterwards."""
        if self._complete:
            refuse_group(param_group)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state, without the state of whole matrices, which is in no group."""
        # torch raises KeyError for the state of a tensor that is in no group
        members = {id(param) for group in self.param_groups for param in group["params"]}
        owned = [key for key in self.state if id(key) not in members]
        hidden = {key: self.state.pop(key) for key in owned}
        try:
            return super().state_dict()
        finally:
            self.state.update(hidden)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; collective over the ranks that store them.

        Args:
            closure: Computes the loss again, with gradients enabled.

        Returns:
            The closure's loss.
        """
        loss = loss_of(closure)
        self._step()
        return loss

    def _step(self) -> None:
        """Update all parameters, without torch's step hooks.

        An override of ``step`` calls this, because ``super().step`` would run the hooks twice.
        """
        self._take_up_groups()
        # Adam's passes are limited by memory and Muon's products by arithmetic, so together they
        # take less time. Rules that fit call no collectives, so all ranks still call them in one
        # order.
        fits = [rule for rule in self.update_rules if rule.fits_beside and rule.host is None]
        others = [rule for rule in self.update_rules if rule not in fits]
        beside = self._side.beside() if fits and others else nullcontext()
        for update_rules, stream in ((fits, beside), (others, nullcontext())):
            with stream:
                for update_rule in update_rules:
                    with self.groups_and_state(update_rule) as (groups, state):
                        update_rule.step(groups, state)
        # what follows on the current stream reads all weights
        self._side.join()

    def _take_up_groups(self) -> None:
        """Let update rules know where users have moved parameters in the groups.

        Raises:
            ConfigurationError: If a parameter stands where no update rule updates it.
        """
        if len(self.param_groups) != len(self._seen):
            raise fixed("param_groups", f"{len(self.param_groups)} groups")
        if self._ids() == self._seen:
            return
        if strangers := self._strangers():
            rule = "not where they were when the optimizer was built, so no step would update them"
            hint = "Build the optimizer again after the model or its groups have changed"
            raise ConfigurationError("param_groups", ", ".join(strangers[:8]), rule, hint)
        self.attach()

    def _ids(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self.param_groups]

    def _strangers(self) -> list[str]:
        """Return what is where no update rule updates it, and what a rule misses, in words."""
        # the rules that may step each tensor in each group
        home: dict[Tensor, range] = {}
        for rule, own in self._places.items():
            for number, shard in enumerate(rule.shards):
                first = own.start + rule.group_of[number]
                # other ranks know by its group how to step what they hold of it, unless they look
                home[shard.main] = (
                    range(own.start, own.stop) if self.lends else range(first, first + 1)
                )
        found = [
            self._described(param, group)
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if number not in home.get(param, ())
        ]
        held = {param for group in self.param_groups for param in group["params"]}
        # rules of whole matrices step all of them, or none
        missed = [
            self.names[param]
            for rule in self.update_rules
            for param in rule.params
            if param not in held and (found or rule.counts_matrices)
        ]
        return [*found, *missed]

    def _described(self, param: Tensor, group: ParamGroup) -> str:
        where = f"a parameter of group {group.get('group_id')!r}, of shape {tuple(param.shape)}"
        return self.names.get(param, where)
