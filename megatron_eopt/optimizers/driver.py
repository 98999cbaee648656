"""What steps parameter groups: one driver per algorithm, over any storage.

Note [Drivers]
    A driver knows the shards it steps, in an order that all ranks of a group share. In a step it
    gets parameter groups whose parameters are this rank's tensors (fragments, slabs, local parts of
    DTensors), with their gradients and state, and :attr:`Driver.shard_numbers` tells which shard
    each of them is. Parameters without a gradient rest: neither they nor their state change, though
    the ranks exchange as always.

    State with a number for each of a tensor's is cut like the tensor. All other state a driver
    describes by :class:`Kept`, whose values are live, so that checkpoints read and write in place.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STEP
from megatron_eopt.layouts import Redistribution
from megatron_eopt.layouts.redistribution import LoadT, StoreT
from megatron_eopt.optimizers.host_memory import HostMemory, HostPlace
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.optimizers.nested_state import put
from megatron_eopt.optimizers.step_stats import StepStats
from megatron_eopt.storage.shard import Shard

OF_GROUPS = "group"
"""First name of the path to what an optimizer counts in its groups."""

type ParamGroup = dict[str, Any]
type State = defaultdict[Tensor, dict[str, Any]]
type InitState = Callable[..., None] | None


@dataclass(frozen=True)
class Kept:
    """One value of state that is not cut like its parameter."""

    shard: int  # number of the shard
    matrix: int  # the logical matrix in its split; 0 where the parameter counts as one
    path: tuple[str, ...]  # what leads to the value, the kind of state first
    value: Any  # a tensor or a plain value
    writes: bool = True  # whether this rank, of those that hold the same numbers, writes them
    slab: tuple[int, int] | None = None  # (rank, size), if it is of one tensor-parallel slab alone
    per_element: bool = False  # whether it has a number for each of a whole matrix's elements
    container: Any = None  # where a plain value is put back

    def replace(self, value: Any) -> None:
        """Take over a loaded value."""
        if isinstance(self.value, Tensor):
            self.value.copy_(torch.as_tensor(value).view(self.value.shape))
        else:
            put(self.container, self.path, type(self.value)(value))


class Driver:
    """Steps some parameter groups; see Note [Drivers]."""

    tells_updates = False  # whether its statistics are told its updates
    counts_matrices = False  # whether each matrix has a count of steps, or each parameter
    is_clipped = True  # whether its gradients are scaled down with all others'
    folds_clipping = False  # whether it does that itself, by :attr:`coefficient`
    # what gradients are multiplied with, on their device; nan if nothing may change; None for 1
    coefficient: Tensor | None = None
    # kinds of state that need not be in what is loaded
    dispensable: frozenset[str] = frozenset()

    def __init__(self, name: str, shards: Sequence[Shard]) -> None:
        self.name = name  # class of the optimizer, for messages
        self.shards = list(shards)
        # for each parameter group the number of the shard of each of its parameters, None for those
        # of another driver
        self.shard_numbers: list[list[int | None]] = []
        # the parameter group of each shard, as far as it is known
        self.group_of: dict[int, int] = {}
        # what brings matrices to where they are computed, and back
        self.redistribution: Redistribution | None = None
        # what keeps a part of its weights and state off the device
        self.host: HostMemory | None = None
        # weights that the optimizer cannot start from, with the reason
        self.faults: list[tuple[str, str]] = []

    @property
    def schedules(self) -> list[Schedule]:
        """Who computes which matrices, and what travels, for each group of ranks."""
        return []

    def measure(self, stats: StepStats | None) -> None:
        """Let steps be measured from now on, or no longer."""
        if self.redistribution is not None:
            self.redistribution.meter = None if stats is None else stats.meter

    def buffers(self) -> Iterator[Tensor]:
        """Yield what lives on between steps apart from weights and state."""
        if self.redistribution is not None:
            yield from self.redistribution.buffers.values()

    def attach(self, places: Sequence[Sequence[int | None]]) -> None:
        """Learn which shard each parameter of each group is."""
        self.shard_numbers = [list(numbers) for numbers in places]
        placed = enumerate(self.shard_numbers)
        self.assign({n: group for group, numbers in placed for n in numbers if n is not None})

    def assign(self, group_of: Mapping[int, int]) -> None:
        """Learn the parameter groups of shards of which this rank may hold nothing."""
        self.group_of.update(group_of)

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make the state of every parameter exist, as far as it can be without a step."""

    def off_load(self, groups: Sequence[ParamGroup], state: State, place: HostPlace) -> None:
        """Keep a fraction of weights and state in the host's memory from now on."""
        sizes = {param: param.numel() for _, param, _ in self.numbered(groups)}
        params = place.chosen(sizes)
        weights = place.movable.intersection(params)
        self.host = HostMemory(params, weights, place, self.is_cut_like_weights)
        self.host.write_back(params, state)
        self.host.settle()

    def expect(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make all state exist that is about to be loaded, as checkpoints have it."""
        self.init(groups, state)

    def saved_form(self, number: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of the shard ``number`` as checkpoints have it."""
        return values

    def pack(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Keep state that was loaded in the form that :meth:`init` gives it; collective."""

    def counting(self, groups: Sequence[ParamGroup], state: State) -> Iterator[dict[str, Any]]:
        """Yield the states, and groups, in which steps are counted."""
        for _, param, _ in self.numbered(groups):
            if STEP in state[param]:
                yield state[param]

    def set_steps(self, groups: Sequence[ParamGroup], state: State, steps: int) -> None:
        """Continue after ``steps`` steps that another run did."""
        for values in self.counting(groups, state):
            set_step(values, steps)

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of ``groups``; all ranks of a group call this together."""
        raise NotImplementedError

    def _run_waves(
        self,
        run: Callable[[LoadT, StoreT], None],
        load: LoadT,
        store: StoreT,
        params_of: Callable[[Iterable[str]], list[Tensor]],
        state: State,
    ) -> None:
        """Run all waves, with what each needs on the device; see :meth:`HostMemory.run`."""
        if self.host is None or self.redistribution is None:
            run(load, store)
        else:
            self.host.run(run, load, store, params_of, self.redistribution.arriving, state)

    def is_cut_like_weights(self, kind: str, value: Any) -> bool:
        """Whether a value in a parameter's state has a number for each of the parameter's."""
        return isinstance(value, Tensor) and value.dim() > 0

    def kept(self, groups: Sequence[ParamGroup], state: State) -> Iterator[Kept]:
        """Yield all state that is not cut like its parameter, step counters apart."""
        return iter(())

    def numbered(self, groups: Sequence[ParamGroup]) -> Iterator[tuple[ParamGroup, Tensor, int]]:
        """Yield every parameter that it steps with its group and the number of its shard."""
        for group, numbers in zip(groups, self.shard_numbers, strict=True):
            for param, number in zip(group["params"], numbers, strict=True):
                if number is not None:
                    yield group, param, number


class CompositeOptimizer(torch.optim.Optimizer):
    """One torch optimizer made of several drivers: what Megatron's distributed optimizer wraps.

    It holds the parameter groups and the state, as every consumer of an optimizer expects. Drivers
    step with the numbers (lr, weight decay) that a scheduler wrote there. :meth:`init_state` starts
    them once they know their places.
    """

    def __init__(
        self, groups: Sequence[ParamGroup], served: Sequence[tuple[Driver, slice]]
    ) -> None:
        # torch refuses an optimizer without groups; a pipeline stage without experts has none
        self._complete = False
        super().__init__([{"params": []}], {})
        self.param_groups = list(groups)
        self.drivers = [driver for driver, _ in served]
        self._served = dict(served)
        self._count = len(self.param_groups)
        self._complete = True

    def init_state(self) -> None:
        """Make the state of every parameter exist, so that it can be saved and loaded."""
        for driver in self.drivers:
            with self.groups_and_state(driver) as (groups, state):
                driver.init(groups, state)
            # state of whole matrices too, for those who move all of it to another device
            self.state.update(getattr(driver, "owned_state", {}))

    def refuse_faults(self) -> None:
        """Raise a ConfigurationError if an optimizer cannot start from weights of this rank."""
        for driver in self.drivers:
            for weight, reason in driver.faults:
                rule = f"cannot start from {weight}: {reason}"
                way_out = "Initialize this weight as the optimizer asks for before it is built"
                raise ConfigurationError("optimizer", driver.name, rule, way_out)

    def groups_of(self, driver: Driver) -> list[ParamGroup]:
        """Return the parameter groups that ``driver`` steps."""
        return self.param_groups[self._served[driver]]

    @contextmanager
    def groups_and_state(self, driver: Driver) -> Iterator[tuple[list[ParamGroup], State]]:
        """Give what ``driver`` works on: groups of this rank's tensors, and their state."""
        yield self.groups_of(driver), self.state

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Refuse, after construction: who computes what is decided when the optimizer is built."""
        if self._complete:
            refuse_group(param_group)
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return groups and state of what is stepped; that of whole matrices is in no group."""
        members = {id(param) for group in self.param_groups for param in group["params"]}
        owned = [key for key in self.state if id(key) not in members]
        hidden = {key: self.state.pop(key) for key in owned}
        try:
            return super().state_dict()
        finally:
            self.state.update(hidden)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters; without a closure."""
        if closure is not None:
            raise ValueError("closure is not supported")
        self._step()

    def _step(self) -> None:
        """Update all parameters, without the hooks that torch puts around the ``step`` of a class.

        A ``step`` that called its base's would run them twice.
        """
        if len(self.param_groups) != self._count:
            raise _fixed("param_groups", f"{len(self.param_groups)} groups")
        for driver in self.drivers:
            with self.groups_and_state(driver) as (groups, state):
                driver.step(groups, state)


def check_may_step(optimizer: Any) -> None:
    """Raise a ConfigurationError if a group has no learning rate yet, or another owner by now."""
    if getattr(optimizer, "superseded", False):
        rule = "an optimizer that was built later owns some of its parameters, and both would step"
        way_out = "Step the later one, or freeze what the other owns while each is built"
        raise ConfigurationError("optimizer.step", type(optimizer).__name__, rule, way_out)
    for group in optimizer.param_groups:
        if group.get("lr", 0.0) is None:
            rule = f"must be written before a step, and group {group.get('group_id')!r} has none"
            way_out = "Give the configuration a learning rate, or step a scheduler first"
            raise ConfigurationError("lr", None, rule, way_out)


def refuse_group(param_group: ParamGroup) -> None:
    """Raise, in place of ``add_param_group``: what is planned is planned for the whole model."""
    raise _fixed("add_param_group", f"{len(list(param_group.get('params', ())))} parameters")


def _fixed(argument: str, value: str) -> ConfigurationError:
    rule = "the plan of who computes what is made once, for the whole model"
    return ConfigurationError(argument, value, rule, "Build the optimizer again")


def refuse_state(*_: Any) -> None:
    """Raise, in place of ``state_dict`` of an optimizer that another one has taken over."""
    raise ConfigurationError(
        "state_dict",
        "an optimizer that another one steps with",
        "has no state of its own, which lies in fragments and at owners",
        "Use sharded_state_dict, or save_state_dict_to_file, of the one that steps",
    )


def set_step(state: dict[str, Any], steps: int) -> None:
    """Set the counter of steps in one state, if there is one, as what it is."""
    if isinstance(state.get(STEP), Tensor):
        # a tensor for each: torch counts in place
        state[STEP] = torch.full_like(state[STEP], steps)
    elif STEP in state:
        state[STEP] = steps


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return what a closure computes with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def bind(
    optimizer: torch.optim.Optimizer, groups: Iterable[ParamGroup], state: State
) -> torch.optim.Optimizer:
    """Let ``optimizer`` work on these from now on."""
    optimizer.param_groups = list(groups)
    optimizer.state = state
    return optimizer


@contextmanager
def bound[T: torch.optim.Optimizer](
    optimizer: T, groups: Iterable[ParamGroup], state: State
) -> Iterator[T]:
    """Let ``optimizer``, which may serve several buffer sets, work on these in a block.

    Outside of it, it has what its user reads and writes.
    """
    before = optimizer.param_groups, optimizer.state
    bind(optimizer, groups, state)
    try:
        yield optimizer
    finally:
        optimizer.param_groups, optimizer.state = before


def empty_states(optimizer: Any) -> list[tuple[dict[str, Any], Tensor]]:
    """Return the states that are to be made, each with its parameter."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [(optimizer.state[param], param) for param in params if not optimizer.state[param]]


def zeros(*names: str, **counters: int) -> Callable[..., None]:
    """Return what gives every parameter without state counters, and zeros of its shape."""

    def init_state(optimizer: Any, config: Any = None) -> None:
        for state, param in empty_states(optimizer):
            state.update(counters, **{name: torch.zeros_like(param.data) for name in names})

    return init_state


@torch.no_grad()
def dry_step(optimizer: Any) -> None:
    """Let every parameter without state have one of the right shape, whose values do not matter.

    Loading needs places to load to. The optimizer steps with zero gradients; parameters, gradients
    and groups are put back.

    Raises:
        ConfigurationError: If it cannot step with zero gradients.
    """
    everything = [param for group in optimizer.param_groups for param in group["params"]]
    bare = [param for _, param in empty_states(optimizer)]
    if not bare:
        return
    values = [param.detach().clone() for param in bare]
    grads = [param.grad for param in everything]
    groups = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0 if group.get("lr") is None else group["lr"]
    for param in everything:
        param.grad = None
    for param in bare:
        param.grad = torch.zeros_like(param)
    try:
        optimizer.step()
    except Exception as error:
        raise ConfigurationError(
            "optimizers",
            type(optimizer).__name__,
            f"makes its state in its first step, which failed with zero gradients: {error}",
            "Give it a function that makes its state exist (init_state_fn)",
        ) from error
    finally:
        for param, value in zip(bare, values, strict=True):
            param.detach().copy_(value)
        for param, grad in zip(everything, grads, strict=True):
            param.grad = grad
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
