"""One torch optimizer over what this rank stores of the parameters, whatever the storage.

Parameter groups and state are those of any torch optimizer. Schedulers, checkpoints and hooks may
change their values at any time, and the next step uses the new ones.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError, refuse_deepspeed
from megatron_eopt.base.gpu import SideStream
from megatron_eopt.base.names import MOMENTUM
from megatron_eopt.optimizers.assigned_rule import AssignedRule
from megatron_eopt.optimizers.host_memory import OffloadSettings
from megatron_eopt.optimizers.lending import keep
from megatron_eopt.optimizers.plain_optimizer import PlainOptimizer
from megatron_eopt.optimizers.update_rule import (
    ParamGroup,
    UpdateRule,
    fixed,
    ids_of,
    loss_of,
    refuse_copy,
    refuse_group,
)
from megatron_eopt.storage.local_tensors import local_of

type Served = Sequence[tuple[UpdateRule, slice]]
"""Each update rule with the slice of groups that it updates."""


class ShardedOptimizer(PlainOptimizer):
    """Steps update rules, in one order on all ranks; Megatron's wrappers may wrap it.

    If Megatron's wrapper replaces parameters, its ``set_assigned`` follows. Then call
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
        self._number_of_groups = len(self.param_groups)
        places = [place for _, place in served]
        self.assigned = [
            AssignedRule(rule, self, place, is_shared=places.count(place) > 1, lends=self.lends)
            for rule, place in served
        ]
        self.update_rules = [rule for rule, _ in served]
        shard_of = {shard.param: shard for rule in self.update_rules for shard in rule.shards}
        self.shards = [shard_of[param] for param in params if param in shard_of]
        self.names: dict[Tensor, str] = {}  # of the tensors that are stepped
        self._seen: list[list[int]] = []  # the tensors of each group in the last step, by their ids
        # of the main optimizer: what schedulers such as OneCycleLR look up
        self.defaults = {k: v for g in self.param_groups[:1] for k, v in g.items() if k != "params"}
        self._side = SideStream()
        self._complete = True
        self.attach()

    def attach(self) -> None:
        """Take up which tensors are stepped, and tell update rules where they are in the groups."""
        self.names = {shard.main: shard.name for shard in self.shards if shard.main is not None}
        for item in self.assigned:
            item.attach()

    def init_state(self) -> None:
        """Create the state of every parameter, so that it can be saved and loaded."""
        for item in self.assigned:
            with item.groups_and_state() as (groups, state):
                item.rule.init(groups, state)
            # the same dictionaries, for code that clears all state or moves it to another device
            self.state.update(item.rule.owned_state)

    def off_load(self, settings: OffloadSettings) -> None:
        """Keep a fraction of weights and state in host memory from now on."""
        for item in self.assigned:
            outer = [param for group in item.groups() for param in group["params"]]
            with item.groups_and_state() as (groups, state):
                stepped = [param for group in groups for param in group["params"]]
                pairs = zip(outer, stepped, strict=True)
                movable = frozenset(tensor for param, tensor in pairs if param in settings.movable)
                item.rule.off_load(groups, state, replace(settings, movable=movable))

    def refuse_faults(self) -> None:
        """Raise a ConfigurationError if an optimizer cannot start from this rank's weights."""
        for update_rule in self.update_rules:
            for weight, reason in update_rule.faults:
                rule = f"cannot start from {weight}: {reason}"
                hint = "Initialize this weight accordingly before building the optimizer"
                raise ConfigurationError("optimizer", update_rule.name, rule, hint)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise a ConfigurationTypeError, because copies could not step."""
        refuse_copy(self)

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group during construction; raise a ConfigurationError afterwards."""
        if self._complete:
            refuse_group(param_group)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state, without the state of whole matrices, which is in no group.

        Momentum has the form that every ``momentum_dtype`` can load.
        """
        # torch raises KeyError for the state of a tensor that is in no group
        members = {id(param) for group in self.param_groups for param in group["params"]}
        owned = [key for key in self.state if id(key) not in members]
        hidden = {key: self.state.pop(key) for key in owned}
        try:
            self._show_as_saved(hidden)
            result: dict[str, Any] = super().state_dict()
            return result
        finally:
            self.state.update(hidden)

    def _show_as_saved(self, kept: dict[Tensor, dict[str, Any]]) -> None:
        """Convert state to the form of state dicts; what it replaces is added to ``kept``."""
        for item in self.assigned:
            update_rule = item.rule
            for _, param, number in update_rule.numbered(item.groups()):
                own = self.state.get(param, {})
                if MOMENTUM not in own:
                    continue  # of another rule, or cleared by a user
                values = {key: local_of(value) for key, value in own.items()}
                shown = update_rule.saved_form(number, values)
                if shown is not values:
                    new: dict[str, Any] = {}
                    keep(update_rule, param, new, shown)
                    kept[param], self.state[param] = own, new

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state; collective if momentum is stored in fewer bits."""
        super().load_state_dict(state_dict)
        # without state while a wrapper replaces parameters in the groups
        if self.state:
            self.pack()

    def pack(self) -> None:
        """Convert all state to the form that it has between steps; collective."""
        for item in self.assigned:
            with item.groups_and_state() as (groups, state):
                item.rule.pack(groups, state)

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
        self._follow_groups()
        for rule in self.update_rules:
            rule.check_shapes()
        # Adam's passes are limited by memory and Muon's products by arithmetic, so together they
        # take less time. Rules that fit call no collectives, so all ranks still call them in one
        # order.
        fits = [item for item in self.assigned if item.rule.fits_beside and item.rule.host is None]
        others = [item for item in self.assigned if item not in fits]
        beside = self._side.beside() if fits and others else nullcontext()
        for items, stream in ((fits, beside), (others, nullcontext())):
            with stream:
                for item in items:
                    with item.groups_and_state() as (groups, state):
                        item.rule.step(groups, state)
        # what follows on the current stream reads all weights
        self._side.join()

    def _follow_groups(self) -> None:
        """Let update rules know where users have moved parameters in the groups.

        Raises:
            ConfigurationError: If a parameter stands where no update rule updates it.
        """
        now = ids_of(self.param_groups)
        if now != self._seen:
            self._refuse_strangers(now)
            self.attach()
            self._seen = now

    def _refuse_strangers(self, now: Sequence[Sequence[int]]) -> None:
        """Raise an error for groups, given by ids, that update rules cannot follow."""
        if len(now) != self._number_of_groups:
            raise fixed("param_groups", f"{len(now)} groups")
        if strangers := self._strangers():
            refuse_deepspeed("deepspeed" in sys.modules)
            rule = "not where they were when the optimizer was built, so no step would update them"
            hint = "Build the optimizer again after the model or its groups have changed"
            raise ConfigurationError("param_groups", ", ".join(strangers[:8]), rule, hint)

    def _strangers(self) -> list[str]:
        """Return what is where no update rule updates it, and what a rule misses, in words."""
        # the rules that may step each tensor in each group
        home: dict[Tensor, range] = {}
        for item in self.assigned:
            first, stop = item.places.start, item.places.stop
            for number, shard in enumerate(item.rule.shards):
                if not self.lends:
                    # other ranks know by its group how to step what they hold of it
                    first = item.places.start + item.rule.group_of[number]
                    stop = first + 1
                home[shard.main] = range(first, stop)
        strangers = [
            self._described(param, group)
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if number not in home.get(param, ())
        ]
        members = {param for group in self.param_groups for param in group["params"]}
        # rules of whole matrices step all of them, or none
        missed = [
            self.names[param]
            for rule in self.update_rules
            for param in rule.params
            if param not in members and (strangers or rule.counts_matrices)
        ]
        return [*strangers, *missed]

    def _described(self, param: Tensor, group: ParamGroup) -> str:
        where = f"a parameter of group {group.get('group_id')!r}, of shape {tuple(param.shape)}"
        return self.names.get(param, where)
