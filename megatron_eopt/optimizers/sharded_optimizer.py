"""One torch optimizer over what this rank stores of the parameters, whatever the storage.

Parameter groups and state are those of any torch optimizer. Schedulers, checkpoints and hooks may
change their values at any time, and the next step uses the new ones.

Note [Lent tensors]
    Update rules step plain tensors of at least 32 bits. Where a parameter is a DTensor, 16-bit or
    complex, a rule gets its local part, a float32 copy, or its real and imaginary parts for one
    step, with state of the same kind. What was a copy is written back afterwards.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.gpu import SideStream
from megatron_eopt.optimizers.host_memory import OffloadSettings
from megatron_eopt.optimizers.update_rule import (
    ParamGroup,
    State,
    UpdateRule,
    fixed,
    loss_of,
    refuse_copy,
    refuse_group,
)
from megatron_eopt.storage.local_tensors import local_of, shard_like

type Served = Sequence[tuple[UpdateRule, slice, Sequence[Tensor]]]
"""Each update rule with the slice of groups and the parameters that it updates, in the order of its
shards."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps update rules, in one order on all ranks; Megatron's wrappers may wrap it.

    Call :meth:`init_state` once the groups hold the tensors that are stepped.

    Args:
        groups: The parameter groups of all update rules.
        served: What each update rule updates.
        names: Name of each parameter; also an attribute.
    """

    lends = False  # whether update rules get local tensors; see Note [Lent tensors]

    def __init__(
        self, groups: Sequence[ParamGroup], served: Served, names: Mapping[Tensor, str]
    ) -> None:
        # torch needs a group, but a pipeline stage without experts may have none
        self._complete = False
        super().__init__([{"params": []}], {})
        self.param_groups = list(groups)
        self.names = dict(names)
        self.update_rules = [update_rule for update_rule, *_ in served]
        self._places = {update_rule: places for update_rule, places, _ in served}
        self._params = {update_rule: list(params) for update_rule, _, params in served}
        # tensors that may stand in each group, and those that stand there, by their ids
        self._members: list[set[int]] = []
        self._seen: list[list[int]] = []
        # of the main optimizer: what schedulers such as OneCycleLR look up
        self.defaults = {k: v for g in self.param_groups[:1] for k, v in g.items() if k != "params"}
        self._side = SideStream()
        self._complete = True

    def params_of(self, update_rule: UpdateRule) -> list[Tensor]:
        """Return the parameters that an update rule updates, in the order of its shards."""
        return self._params[update_rule]

    def follow(self, replaced: Mapping[Tensor, Tensor]) -> None:
        """Update other tensors from now on, which are in ``param_groups`` and ``state`` already.

        Args:
            replaced: The new tensor for each old one: a fragment, or a float32 copy.
        """
        self.names = {replaced.get(param, param): name for param, name in self.names.items()}
        self._params = {
            update_rule: [replaced.get(param, param) for param in params]
            for update_rule, params in self._params.items()
        }
        self._note_groups()

    def init_state(self) -> None:
        """Create the state of every parameter, so that it can be saved and loaded."""
        self._attach()
        for update_rule in self.update_rules:
            with self.groups_and_state(update_rule) as (groups, state):
                update_rule.init(groups, state)
            # the same dictionaries, for code that clears all state or moves it to another device
            self.state.update(update_rule.owned_state)
        self._note_groups()

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
        if not self.lends:
            return groups
        # several rules may update parts of one group
        mine = set(self._params[update_rule])
        return [{**group, "params": [p for p in group["params"] if p in mine]} for group in groups]

    @contextmanager
    def groups_and_state(self, update_rule: UpdateRule) -> Iterator[tuple[list[ParamGroup], State]]:
        """Provide what an update rule works on: groups of this rank's tensors, and their state."""
        self.take_up_state(update_rule)
        if not self.lends:
            yield self.groups_of(update_rule), self.state
            return
        lent = {p: _stepped(local_of(p).detach()) for p in self._params[update_rule]}
        # keyed by the lent tensors, because update rules look state up by what they step
        state: State = defaultdict(dict)
        for param, its in lent.items():
            state[its] = {key: _real(local_of(v)) for key, v in self.state[param].items()}
        with _followed(update_rule, lent):
            with update_rule.host.stood_in_for() if update_rule.host else nullcontext():
                for param, its in lent.items():
                    if param.grad is not None:
                        its.grad = _grad(param, its.dtype, self.names[param])
            groups = [
                {**group, "params": [lent[param] for param in group["params"]]}
                for group in self.groups_of(update_rule)
            ]
            yield groups, state
        for param, its in lent.items():
            local = local_of(param)
            # only what was a copy has to be stored; without a gradient it has not changed
            if _is_rounded(local):
                if param.grad is not None:
                    local.copy_(its)
            elif update_rule.host and param in update_rule.host.weights:
                # a main weight, which may have moved
                local.data = its.data
            self.keep(update_rule, param, state[its])
        outer = self.param_groups[self._places[update_rule]]
        for group, its_group in zip(outer, groups, strict=True):
            # some optimizers count steps in their groups, which are copies here
            group.update({key: value for key, value in its_group.items() if key != "params"})

    def keep(self, update_rule: UpdateRule, param: Tensor, state: Mapping[str, Any]) -> None:
        """Store new state, as DTensors where it is sharded like the parameter."""
        kept = self.state[param]
        for key, value in state.items():
            # a tensor that was changed in place is in its DTensor already
            if not (key in kept and local_of(kept[key]) is value):
                cut = update_rule.is_sharded_like_param(key, value)
                kept[key] = shard_like(param, _stored(param, value)) if cut else value

    def take_up_state(self, update_rule: UpdateRule) -> None:
        """Let an update rule know what users have cleared or replaced in :attr:`state`."""
        update_rule.owned_state |= {param: self.state[param] for param in update_rule.owned_state}

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
        with self._side.beside() if others else nullcontext():
            self._step_rules(fits)
        self._step_rules(others)
        # what follows on the current stream reads all weights
        self._side.join()

    def _step_rules(self, update_rules: Sequence[UpdateRule]) -> None:
        for update_rule in update_rules:
            with self.groups_and_state(update_rule) as (groups, state):
                update_rule.step(groups, state)

    def _note_groups(self) -> None:
        """Note which tensors stand in the groups, and which may."""
        self._members = [set(map(id, self._may_hold(n))) for n in range(len(self.param_groups))]
        self._seen = self._ids()

    def _take_up_groups(self) -> None:
        """Let update rules know where users have moved parameters in the groups.

        Raises:
            ConfigurationError: If a parameter stands where no update rule updates it.
        """
        if len(self.param_groups) != len(self._seen):
            raise fixed("param_groups", f"{len(self.param_groups)} groups")
        if (seen := self._ids()) == self._seen:
            return
        if strangers := self._strangers():
            rule = "not where they were when the optimizer was built, so no step would update them"
            hint = "Build the optimizer again after the model or its groups have changed"
            raise ConfigurationError("param_groups", ", ".join(strangers[:8]), rule, hint)
        self._attach()
        self._seen = seen

    def _ids(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self.param_groups]

    def _may_hold(self, number: int) -> list[Tensor]:
        """Return the tensors that may stand in a group."""
        if not self.lends:
            # other ranks know by its group how to step what they hold of it
            return list(self.param_groups[number]["params"])
        return [
            param
            for update_rule, places in self._places.items()
            if places.start <= number < places.stop
            for param in self._params[update_rule]
        ]

    def _strangers(self) -> list[str]:
        """Return what is where no update rule updates it, and what a rule misses, in words."""
        found = [
            self._described(param, group)
            for group, members in zip(self.param_groups, self._members, strict=True)
            for param in group["params"]
            if id(param) not in members
        ]
        held = {id(param) for group in self.param_groups for param in group["params"]}
        lost = set[int]().union(*self._members) - held
        # rules of whole matrices step all of them, or none
        missed = [
            self.names.get(param, "a parameter")
            for update_rule in self.update_rules
            for param in self._params[update_rule]
            if id(param) in lost and (found or update_rule.counts_matrices)
        ]
        return [*found, *missed]

    def _described(self, param: Tensor, group: ParamGroup) -> str:
        where = f"a parameter of group {group.get('group_id')!r}, of shape {tuple(param.shape)}"
        return self.names.get(param, where)

    def _attach(self) -> None:
        """Tell update rules which of their shards the parameters of the groups are."""
        for update_rule in self.update_rules:
            number_of = {param: number for number, param in enumerate(self._params[update_rule])}
            update_rule.attach(
                [[number_of[p] for p in g["params"]] for g in self.groups_of(update_rule)]
            )


@contextmanager
def _followed(update_rule: UpdateRule, lent: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """In a block, let host memory know parameters by their lent tensors, which exist only there."""
    if update_rule.host is not None:
        update_rule.host.follow(lent)
    try:
        yield
    finally:
        # the block itself may have off-loaded
        if update_rule.host is not None:
            update_rule.host.follow({its: param for param, its in lent.items()})


def sparse_gradient(argument: str, value: object) -> ConfigurationError:
    """Return the error for gradients that no optimizer here can use."""
    rule = "sparse gradients are not supported"
    return ConfigurationError(argument, value, rule, "Use a dense gradient (sparse=False)")


def _grad(param: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    grad: Any = param.grad
    if grad.layout != torch.strided:
        raise sparse_gradient(f"gradient of {name}", grad.layout)
    placements = getattr(param, "placements", None)
    if isinstance(grad, DTensor) and grad.placements != placements:
        # such as gradients that are not reduced yet (Partial); collective, and all ranks have the
        # same placements
        grad = grad.redistribute(placements=placements)
    return _real(local_of(grad)).to(dtype)  # type: ignore[no-any-return]


def _is_rounded(local: Tensor) -> bool:
    """Whether weights have fewer bits than what a step computes."""
    return local.dtype in (torch.bfloat16, torch.float16)


def _stepped(local: Tensor) -> Tensor:
    """Return what an update rule steps: the same memory, or a float32 copy of 16-bit weights."""
    return local.to(torch.float32) if _is_rounded(local) else _real(local)


def _real(value: Any) -> Any:
    """Return a complex tensor's real and imaginary parts, and any other value unchanged.

    Optimizers update both parts independently, as torch's do.
    """
    is_complex = isinstance(value, Tensor) and value.is_complex()
    return torch.view_as_real(value.resolve_conj()) if is_complex else value


def _stored(param: Tensor, value: Tensor) -> Tensor:
    """Return state in the form that the parameter has, complex or real."""
    return torch.view_as_complex(value) if param.is_complex() else value
