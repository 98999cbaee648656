"""A torch optimizer over DTensors, whose drivers update this rank's shards as plain tensors.

Parameter groups and state hold DTensors. Schedulers, checkpoints and hooks may change them at any
time, and the next step uses the new values. In a step, every driver gets the shards of its
parameters, in float32, with gradients and state.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_eopt.base.agreement import agreed
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MOMENTUM_SCALE, STEP
from megatron_eopt.config.registry import name_of_class
from megatron_eopt.layouts import Plan
from megatron_eopt.math.precision import matmul_precision
from megatron_eopt.optimizers.continuation import Policy, Reader
from megatron_eopt.optimizers.driver import (
    CompositeOptimizer,
    Driver,
    ParamGroup,
    State,
    check_may_step,
    loss_of,
    set_step,
)
from megatron_eopt.optimizers.owner_driver import OwnerDriver
from megatron_eopt.optimizers.owner_state import OwnerState
from megatron_eopt.optimizers.saved_groups import take_settings
from megatron_eopt.optimizers.state_dicts import Loaded, StateDictMatch, Target, named
from megatron_eopt.routing.frozen import Frozen
from megatron_eopt.storage.dtensors import is_uneven, local_of, shard_like


class StepObserver(Protocol):
    """Measures steps."""

    def collecting(self) -> AbstractContextManager[None]:
        """Measure the step in a block."""

    def values(self) -> dict[str, float]:
        """Return the statistics of the last measured step; collective."""


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

    collects_stats = False  # whether to measure the next steps; the same on all ranks
    steps = 0  # number of steps done
    _observer: StepObserver | None = None
    frozen: Frozen | None = None  # notices what is unfrozen later, in your own loop

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        served: Sequence[tuple[Driver, slice, Sequence[Tensor]]],
        names: Mapping[Tensor, str],
    ) -> None:
        self.names = dict(names)
        self.policy = Policy()
        self._params = {driver: list(params) for driver, _, params in served}
        # shapes of the state that owners keep, by parameter and name; None for a number
        self._shapes: dict[Tensor, dict[str, tuple[int, ...] | None]] = {}
        super().__init__(groups, [(driver, places) for driver, places, _ in served])
        self._attach()
        self.init_state()
        agreed(self.refuse_faults)
        self._owned: dict[Driver, OwnerState] = {
            driver: OwnerState(driver, local_of(self._params[driver][0]).device)
            for driver in self.drivers
            if isinstance(driver, OwnerDriver)
        }
        for driver, owned in self._owned.items():
            with self.groups_and_state(driver) as (groups_of, state):
                entries = owned.entries(groups_of, state)
            self._stand_for(driver, [[entry.name for entry in its] for its in entries])

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
                shard.grad = _grad(param, shard.dtype, self.names[param])
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
        if self.frozen is not None:
            self.frozen.warn()
        self._attach()
        observer = self._observer if self.collects_stats else None
        with observer.collecting() if observer else nullcontext(), matmul_precision():
            super()._step()
            self.steps += 1

    def observe(self, observer: StepObserver) -> None:
        """Let ``observer`` measure steps while ``collects_stats`` is set."""
        self._observer = observer

    def stats(self) -> dict[str, float]:
        """Return the statistics of the last measured step by name; collective."""
        return self._observer.values() if self._observer else {}

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return groups and state; collective, so all ranks must call it together.

        Raises:
            ConfigurationError: On all ranks, if an owner's state cannot be restored.
        """
        published: dict[Driver, list[dict[str, Any]]] = {}
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
        names = [[self.names[param] for param in group["params"]] for group in self.param_groups]
        return named(result, names, by_group=True)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and state; collective.

        A group takes the settings of the group with its identity. :attr:`policy` says which state
        may be missing.

        Raises:
            ConfigurationError: On all ranks and before any change, if a parameter's state is
                missing, belongs to another optimizer, or does not fit.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self.expect()
        match, loaded = agreed(lambda: self.checked(state_dict, self.policy))
        for group, place in zip(self.param_groups, match.twins, strict=True):
            if place is not None:
                take_settings(group, state_dict["param_groups"][place])
        self.take(loaded)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def expect(self) -> None:
        """Create all state that can be loaded, before :meth:`checked`; collective."""
        for driver in self.drivers:
            owned = self._owned.get(driver)
            with self.groups_and_state(driver) as (groups, state):
                if getattr(driver, "rounding", None) is None:
                    driver.expect(groups, state)
                entries = [] if owned is None else owned.entries(groups, state)
            if owned is not None:
                self._stand_for(driver, [[entry.name for entry in its] for its in entries])
            for param, its in zip(self._params[driver], entries, strict=False):
                self._shapes[param] = {entry.name: entry.shape for entry in its}

    def checked(
        self, state_dict: Any, policy: Policy
    ) -> tuple[StateDictMatch, dict[Tensor, Loaded]]:
        """Return what a state dict would load, without a change; call :meth:`expect` before.

        Raises:
            ConfigurationError: If state is missing or does not fit.
        """
        driver_of = {param: driver for driver, its in self._params.items() for param in its}
        targets = [
            [self._target(group, param, driver_of[param]) for param in group["params"]]
            for group in self.param_groups
        ]
        match = StateDictMatch(state_dict, self.param_groups, targets)
        loaded = match.load(policy, self._misfit, has_stepped=self.steps > 0)
        return match, loaded

    def take(self, loaded: Mapping[Tensor, Loaded]) -> None:
        """Load what :meth:`checked` returned; collective."""
        for driver in self.drivers:
            for param in () if driver in self._owned else self._params[driver]:
                if loaded[param].starts_fresh:
                    # torch's distributed checkpoints may have been loaded in place
                    self.state[param].clear()
            with self.groups_and_state(driver) as (groups, state):
                driver.expect(groups, state)
                if driver in self._owned:
                    saved = [loaded[param].converted() for param in self._params[driver]]
                    self._owned[driver].adopt(groups, state, saved)
                    # the groups of a checkpoint may have set counts of state that starts fresh
                    for count in self._owned[driver].counts():
                        if loaded[self._params[driver][count.shard]].starts_fresh:
                            count.replace(0)
            if driver not in self._owned:
                for param in self._params[driver]:
                    _write(self.state[param], loaded[param])
        self.pack()

    def _target(self, group: ParamGroup, param: Tensor, driver: Driver) -> Target:
        keys = frozenset(self.state[param].keys())
        reader = Reader(name_of_class(driver.name), group.get("momentum"))
        own = keys - {STEP, MOMENTUM_SCALE}
        return Target(param, self.names[param], reader, own, STEP in keys, driver.dispensable)

    def _misfit(self, target: Target, key: str, value: Any) -> str | None:
        """Return why a saved value cannot be loaded; None if it can."""
        own, shapes = self.state[target.param][key], self._shapes.get(target.param, {})
        if key in shapes:
            shape = tuple(value.shape) if isinstance(value, Tensor) and value.dim() else None
            return None if shape == shapes[key] else f"of shape {shape} must have {shapes[key]}"
        if not (isinstance(own, Tensor) and isinstance(value, Tensor)):
            kinds = type(value).__name__, type(own).__name__
            same = isinstance(own, Tensor) == isinstance(value, Tensor)
            return None if same else "is of type {}, and must be of type {}".format(*kinds)
        if own.shape != value.shape:
            return f"of shape {tuple(value.shape)} must have shape {tuple(own.shape)}"
        alike = _are_placed_alike(own, value)
        if (alike or is_uneven(target.param)) and local_of(own).shape != local_of(value).shape:
            return "is sharded otherwise"
        return None

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


def _write(own: dict[str, Any], loaded: Loaded) -> None:
    """Copy checked values into a parameter's state."""
    if loaded.starts_fresh:
        set_step(own, 0)
    for key, value in loaded.values.items():
        mine = own[key]
        if key == STEP:
            set_step(own, int(value))
            continue
        if not isinstance(mine, Tensor):
            own[key] = type(mine)(value)
            continue
        if not _are_placed_alike(mine, value):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            value = whole
            if isinstance(mine, DTensor):
                # every rank has the whole tensor, and takes its own part
                mesh, placements = mine.device_mesh, mine.placements
                value = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        local_of(mine).copy_(local_of(value))
        local_of(mine).mul_(loaded.factors.get(key, 1.0))


def _are_placed_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are sharded over the same ranks in the same way."""
    if not (isinstance(one, DTensor) and isinstance(other, DTensor)):
        return isinstance(one, DTensor) == isinstance(other, DTensor)
    return one.placements == other.placements and one.device_mesh == other.device_mesh


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
