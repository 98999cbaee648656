"""A torch optimizer over DTensors, whose drivers update this rank's shards as plain tensors.

Parameter groups and state hold DTensors. Schedulers, checkpoints and hooks may change them at any
time, and the next step uses the new values. In a step, every driver gets the shards of its
parameters, in float32, with gradients and state.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Shard as ShardPlacement

from megatron_eopt.base.agreement import agreed, of_every_rank
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts import Plan
from megatron_eopt.optimizers.driver import (
    CompositeOptimizer,
    Driver,
    Kept,
    ParamGroup,
    State,
    check_may_step,
    loss_of,
)
from megatron_eopt.optimizers.owner_driver import OwnerDriver
from megatron_eopt.storage.dtensors import local_of, shard_like


@dataclass(frozen=True)
class _Entry:
    """One state value of one matrix, as all ranks know it."""

    shard: int  # index of the parameter's shard
    name: str  # its key in the state dict
    owner: int  # the rank that holds it
    shape: tuple[int, ...] | None  # None for a number
    number: Any
    problem: str  # the type that cannot be restored; empty if it can


class OwnerState:
    """Publishes and loads the state that one driver's owner ranks keep."""

    def __init__(self, driver: OwnerDriver, device: torch.device) -> None:
        self._driver = driver
        self._device = device
        self._ranks = driver.shards[0].ranks
        group = self._ranks.group
        self._mesh = None if group is None else DeviceMesh.from_group(group, device.type)

    def names(self, groups: Sequence[ParamGroup], state: State) -> list[list[str]]:
        """Return the names of every parameter's state that owners have so far; collective."""
        found: list[list[str]] = [[] for _ in self._driver.shards]
        for entry in self._survey(groups, state)[1]:
            found[entry.shard].append(entry.name)
        return found

    def publish(self, groups: Sequence[ParamGroup], state: State) -> list[dict[str, Any]]:
        """Return the state of every parameter, in the order of shards; collective over the group.

        Raises:
            ConfigurationError: On all ranks, if an owner's state cannot be restored.
        """
        kept, entries = self._survey(groups, state)
        if problems := [entry for entry in entries if entry.problem]:
            argument = f"state {problems[0].name!r} of {self._driver.name}"
            rule = "only float32 tensors and numbers can be saved"
            way_out = "Use another optimizer, or run without checkpoints"
            raise ConfigurationError(argument, problems[0].problem, rule, way_out)
        states: list[dict[str, Any]] = [{} for _ in self._driver.shards]
        for entry in entries:
            value = entry.number
            if entry.shape is not None:
                mine = kept.get((entry.shard, entry.name))
                value = self._cut(entry, torch.empty(0) if mine is None else mine.value)
            states[entry.shard][entry.name] = value
        return states

    def adopt(
        self, groups: Sequence[ParamGroup], state: State, saved: Sequence[Mapping[str, Any]]
    ) -> None:
        """Load what :meth:`publish` returned on any number of ranks; collective."""
        kept, entries = self._survey(groups, state)
        for entry in entries:
            value = saved[entry.shard][entry.name]
            if isinstance(value, DTensor):
                value = value.full_tensor()
            if (entry.shard, entry.name) in kept:
                kept[entry.shard, entry.name].replace(value)

    def _survey(
        self, groups: Sequence[ParamGroup], state: State
    ) -> tuple[dict[tuple[int, str], Kept], list[_Entry]]:
        """Return the state that this rank keeps, and entries of all ranks; collective."""
        found = (*self._driver.kept(groups, state), *self._driver.counts())
        kept = {(item.shard, self._name(item)): item for item in found}
        mine = [
            _describe(shard, name, self._ranks.rank, item.value)
            for (shard, name), item in kept.items()
        ]
        known = [entry for entries in of_every_rank(mine, self._ranks.group) for entry in entries]
        return kept, sorted(known, key=lambda entry: (entry.shard, entry.name))

    def _name(self, item: Kept) -> str:
        matrices = self._driver.shards[item.shard].split.matrices
        prefix = (matrices[item.matrix].name,) if len(matrices) > 1 else ()
        return "/".join((*prefix, *item.path))

    def _cut(self, entry: _Entry, whole: Tensor) -> Tensor:
        """Return this rank's rows of a tensor that only its owner passes; collective."""
        if self._mesh is None:
            return whole.clone()
        if entry.owner != self._ranks.rank:
            assert entry.shape is not None
            whole = torch.empty(entry.shape, dtype=torch.float32, device=self._device)
        rows = [ShardPlacement(0)]
        return distribute_tensor(whole, self._mesh, rows, src_data_rank=entry.owner)


def _describe(shard: int, name: str, owner: int, value: Any) -> _Entry:
    is_tensor = isinstance(value, Tensor)
    if is_tensor and value.dim():
        problem = "" if value.dtype == torch.float32 else str(value.dtype)
        return _Entry(shard, name, owner, tuple(value.shape), None, problem)
    problem = "" if is_tensor or isinstance(value, bool | int | float) else type(value).__name__
    number = value.cpu() if is_tensor else value
    return _Entry(shard, name, owner, None, None if problem else number, problem)


class ShardedOptimizer(CompositeOptimizer):
    """Updates the parameters of a sharded model; see :func:`megatron_eopt.fsdp2.build_optimizer`.

    ``momentum_buffer`` and similar state are float32 DTensors with the parameter's placements.
    Statistics of whole matrices are plain tensors, the same on all ranks. State of whole matrices
    (SOAP) stays on owner ranks; only :meth:`state_dict` has it, as DTensors sharded by rows.

    Args:
        groups: Parameter groups.
        served: Each driver with the slice of groups and the parameters that it updates; the
            parameters are in the order of its shards.
        names: Name of each parameter; also an attribute.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        served: Sequence[tuple[Driver, slice, Sequence[Tensor]]],
        names: Mapping[Tensor, str],
    ) -> None:
        self.names = dict(names)
        self._params = {driver: list(params) for driver, _, params in served}
        super().__init__(groups, [(driver, places) for driver, places, _ in served])
        self._attach()
        self.init_state()
        agreed(self.refuse_faults)
        self._owned = {
            driver: OwnerState(driver, local_of(self._params[driver][0]).device)
            for driver in self.drivers
            if isinstance(driver, OwnerDriver)
        }
        for driver, owned in self._owned.items():
            with self.groups_and_state(driver) as (groups_of, state):
                self._stand_for(driver, owned.names(groups_of, state))

    @property
    def plans(self) -> list[Plan]:
        """What is sent in a step: one plan for each set of ranks that shares matrices."""
        return [item.plan for driver in self.drivers for item in driver.schedules]

    def params_of(self, driver: Driver) -> list[Tensor]:
        """Return the parameters that a driver updates, in the order of its shards."""
        return self._params[driver]

    def follow(self, replaced: Mapping[Tensor, Tensor]) -> None:
        """Update other tensors from now on, such as float32 copies of 16-bit parameters.

        The caller must have put them into ``param_groups`` and ``state``.

        Args:
            replaced: The new tensor for each old one, with the same shape and placements.
        """
        self.names = {replaced.get(param, param): name for param, name in self.names.items()}
        self._params = {
            driver: [replaced.get(param, param) for param in params]
            for driver, params in self._params.items()
        }

    def groups_of(self, driver: Driver) -> list[ParamGroup]:
        """Return the groups that ``driver`` updates, with only its own parameters."""
        mine = set(self._params[driver])
        return [
            {**group, "params": [param for param in group["params"] if param in mine]}
            for group in super().groups_of(driver)
        ]

    @contextmanager
    def groups_and_state(self, driver: Driver) -> Iterator[tuple[list[ParamGroup], State]]:
        """Provide a driver with this rank's shards and state, and store its results."""
        # the local tensor itself, or a float32 copy of a 16-bit one
        shards = {p: _stepped(local_of(p).detach()) for p in self._params[driver]}
        state: State = defaultdict(dict)
        for param, shard in shards.items():
            state[shard] = {key: _real(local_of(v)) for key, v in self.state[param].items()}
            if param.grad is not None:
                shard.grad = _grad(param, shard.dtype)
        groups = [
            {**group, "params": [shards[param] for param in group["params"]]}
            for group in self.groups_of(driver)
        ]
        yield groups, state
        for param, shard in shards.items():
            local = local_of(param)
            if _is_rounded(local) and param.grad is not None:
                local.copy_(shard)
            self._keep(driver, param, state[shard])
        for outer, group in zip(super().groups_of(driver), groups, strict=True):
            outer.update({key: value for key, value in group.items() if key != "params"})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; collective over the ranks that store them.

        Parameters without a gradient do not change.

        Args:
            closure: Computes the loss again, with gradients enabled.

        Returns:
            The closure's loss.
        """
        loss = loss_of(closure)
        self._step()
        return loss

    def _step(self) -> None:
        check_may_step(self)
        self._attach()
        super()._step()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return groups and state; collective, so all ranks must call it together.

        Raises:
            ConfigurationError: On all ranks, if an owner's state cannot be restored.
        """
        published: dict[OwnerDriver, list[dict[str, Any]]] = {}
        for driver, owned in self._owned.items():
            with self.groups_and_state(driver) as (groups, state):
                published[driver] = owned.publish(groups, state)
        for driver, found in published.items():
            for param, found_of in zip(self._params[driver], found, strict=True):
                self.state[param].update(found_of)
        kept = self._show_as_saved()
        result = super().state_dict()
        self.state.update(kept)
        for driver, found in published.items():
            # only owners keep the values, and the result keeps the dictionaries replaced here
            self._stand_for(driver, found)
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state; collective.

        Raises:
            ConfigurationError: On all ranks and before any change, if a parameter's state is
                missing.
        """
        for driver, owned in self._owned.items():
            with self.groups_and_state(driver) as (groups, state):
                driver.expect(groups, state)
                names = owned.names(groups, state)
            self._stand_for(driver, names)
        agreed(lambda: self._refuse_gaps(state_dict))
        super().load_state_dict(state_dict)
        self._restore_dtypes(state_dict)
        self.pack()
        for driver, owned in self._owned.items():
            saved = [dict(self.state[param]) for param in self._params[driver]]
            self._stand_for(driver, saved)
            with self.groups_and_state(driver) as (groups, state):
                owned.adopt(groups, state, saved)

    def unpack(self) -> None:
        """Convert all state to the form that state dicts have."""
        self._show_as_saved()

    def pack(self) -> None:
        """Convert all state to the form that it has between steps; collective."""
        for driver in self.drivers:
            with self.groups_and_state(driver) as (groups, state):
                driver.pack(groups, state)

    def _attach(self) -> None:
        """Tell drivers which of their shards the parameters of the groups are."""
        for driver in self.drivers:
            number_of = {param: number for number, param in enumerate(self._params[driver])}
            places = [[number_of[p] for p in group["params"]] for group in self.groups_of(driver)]
            if driver.shard_numbers != places:
                driver.attach(places)

    def _stand_for(self, driver: Driver, kinds: Sequence[Iterable[str]]) -> None:
        """Set keys without values for state that owners keep, because torch reads the keys."""
        for param, names in zip(self._params[driver], kinds, strict=True):
            self.state[param] = dict.fromkeys(names)

    def _refuse_gaps(self, state_dict: Mapping[str, Any]) -> None:
        """Raise a ConfigurationError if a state dict lacks state that a step needs."""
        loaded = {p: state_dict["state"].get(key, {}) for key, p in self._saved_under(state_dict)}
        for driver in self.drivers:
            for param in self._params[driver]:
                kept = self.state[param].keys() - driver.dispensable
                if missing := sorted(kept - loaded[param].keys()):
                    rule = f"lacks {', '.join(missing)} of {self.names[param]}"
                    way_out = "Load what this optimizer saved, or use fsdp2.import_torch_muon"
                    raise ConfigurationError("state_dict", "incomplete", rule, way_out)

    def _saved_under(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
        """Yield each parameter's key in the state dict, with the parameter."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        return zip(saved, params, strict=True)

    def _show_as_saved(self) -> dict[Tensor, dict[str, Any]]:
        """Convert state to the form of state dicts, and return the state that it replaced."""
        kept = {}
        for driver in self.drivers:
            for _, param, number in driver.numbered(self.groups_of(driver)):
                values = {key: local_of(value) for key, value in self.state[param].items()}
                shown = driver.saved_form(number, values)
                if shown is not values:
                    kept[param] = self.state[param]
                    self.state[param] = {}
                    self._keep(driver, param, shown)
        return kept

    def _keep(self, driver: Driver, param: Tensor, state: Mapping[str, Any]) -> None:
        """Store new state, as DTensors where it is sharded like the parameter."""
        kept = self.state[param]
        for key, value in state.items():
            if not (key in kept and local_of(kept[key]) is value):
                cut = driver.is_cut_like_weights(key, value)
                kept[key] = shard_like(param, _stored(param, value)) if cut else value

    def _restore_dtypes(self, state_dict: dict[str, Any]) -> None:
        """Undo torch's conversion of state (except steps) to the dtype of 16-bit parameters."""
        for number, param in self._saved_under(state_dict):
            if param.dtype == torch.float32:
                continue
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and key != "step":
                    self.state[param][key] = value.to(param.device)


def _grad(param: Tensor, dtype: torch.dtype) -> Tensor:
    grad: Any = param.grad
    placements = getattr(param, "placements", None)
    if isinstance(grad, DTensor) and grad.placements != placements:
        grad = grad.redistribute(placements=placements)
    return _real(local_of(grad)).to(dtype)  # type: ignore[no-any-return]


def _is_rounded(local: Tensor) -> bool:
    """Whether weights have fewer bits than what a step computes."""
    return local.dtype in (torch.bfloat16, torch.float16)


def _stepped(local: Tensor) -> Tensor:
    """Return what a driver steps: the same memory, or a float32 copy of 16-bit weights."""
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
