"""Update rules: each runs one algorithm on parameters, however they are sharded.

Note [Update rules]
    An update rule lists its shards in an order that all ranks of a group share. In a step it gets
    parameter groups whose parameters are this rank's tensors (ZeRO-1 fragments, tensor-parallel
    slabs, local parts of DTensors), with gradients and state. :attr:`UpdateRule.shard_numbers`
    gives the shard of each. Parameters without a gradient, and their state, do not change, although
    their ranks still communicate.

    State with one element per element of a parameter is sharded like the parameter. All other state
    is described by :class:`UnshardedState`, so that checkpoints can read and write it in place.

Note [Lifetimes]
    A step of :class:`~megatron_eopt.optimizers.muon_rule.MuonRule` runs its hooks in this order.
    Ranks may run those of a wave in different numbers: a parameter's updates return with the last
    wave that writes to this rank's part of it. So only hooks that all ranks run alike may
    communicate. Anywhere else, a collective may hang, or add up different parameters.

    ================  =====================================  =======================================
    hook              runs                                   collectives
    ================  =====================================  =======================================
    ``_run``          once a step, around all others         allowed, before and after ``super()``
    ``_directions``   once a wave, in order                  for ``arriving``, the same on all ranks
    ``_update``       for each stack of matrices             only ``reduce``
    ``partial_sums``  for each parameter, with its last wave none
    ``use_totals``    for each parameter, after all waves    none: totals are those of all ranks
    ``_apply``        for the parameters of a last wave, or  none
                      after all waves if there are sums
    ================  =====================================  =======================================

    What a hook gets is valid as follows. Copy what has to live longer.

    * A stack: until ``_update`` returns.
    * A direction: until its update returns. One that ``_directions`` writes to ``outs`` also gets
      its update there.
    * An update: until ``_apply`` returns, because the next wave may overwrite the memory. In a
      MatrixSumsRule, updates are new tensors and live until the end of the step.
    * Weights and state that are sharded like them: from ``_directions`` to ``partial_sums``, and in
      ``use_totals`` and ``_apply``. At other times they may be in host memory, which is copied
      without waiting.
    * Gradients and all other state: the whole step. Gradients are not clipped yet if
      ``fuses_grad_scale`` is set; :attr:`UpdateRule.grad_scale` is the factor.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.base.names import STEP
from megatron_eopt.base.nested_state import put
from megatron_eopt.math.precision import matmul_precision
from megatron_eopt.optimizers.exchange import MatrixExchange
from megatron_eopt.optimizers.host_memory import HostMemory, OffloadSettings
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.optimizers.recorder import RuleRecord
from megatron_eopt.storage.shard import ParamShard

OF_GROUPS = "group"
"""First name of the path to a counter that an optimizer keeps in a parameter group."""

type ParamGroup = dict[str, Any]
type State = defaultdict[Tensor, dict[str, Any]]
type InitState = Callable[..., None] | None


@dataclass(frozen=True)
class UnshardedState:
    """One state value that is not sharded like its parameter."""

    shard: int  # index of the parameter's shard
    matrix: int  # index of the logical matrix in the split; 0 if the parameter counts as one
    path: tuple[str, ...]  # keys that lead to the value; the first is the kind of state
    value: Any  # a tensor or a plain value
    writes: bool = True  # whether this rank saves it, if several ranks hold the same value
    slab: tuple[int, int] | None = None  # (rank, size), if it belongs to one tensor-parallel slab
    per_element: bool = False  # whether it has one element per element of the whole matrix
    container: Any = None  # where a plain value is written back

    def replace(self, value: Any) -> None:
        """Overwrite the value with a loaded one."""
        if isinstance(self.value, Tensor):
            # in place, because the optimizer, or another matrix of the parameter, refers to this
            # memory
            self.value.copy_(torch.as_tensor(value).view(self.value.shape))
        else:
            put(self.container, self.path, type(self.value)(value))


class UpdateRule:
    """Updates some parameter groups; see Note [Update rules]."""

    reports_updates = False  # whether it reports its updates to :attr:`record`
    counts_matrices = False  # whether steps are counted per matrix, not per parameter
    is_clipped = True  # whether gradient clipping applies to its gradients
    # whether its passes may run on a stream beside the matrix products of other rules; such a rule
    # must not call collectives
    fits_beside = False
    fuses_grad_scale = False  # whether it applies clipping itself, by :attr:`grad_scale`
    # factor on gradients, a 0-D tensor; nan skips the step, None is 1; set by `scale_gradients`
    grad_scale: Tensor | None = None
    # its optimizer, if that has a `grad_scale` of its own, as it may step without this rule
    one_pass: Any = None
    optional_state: frozenset[str] = frozenset()  # kinds of state that a checkpoint may lack

    def __init__(self, name: str, shards: Sequence[ParamShard]) -> None:
        self.name = name  # class of the optimizer, for messages
        self.shards = list(shards)
        # for each group, the shard of each parameter; None for parameters of other update rules
        self.shard_numbers: list[list[int | None]] = []
        self.group_of: dict[int, int] = {}  # the parameter group of each shard
        self.exchanges: list[MatrixExchange] = []  # what computes whole matrices, if it does
        self.record: RuleRecord | None = None  # measures its steps
        self.host: HostMemory | None = None  # keeps some weights and state in host memory
        self.faults: list[tuple[str, str]] = []  # weights that it cannot start from, and why
        self._first_shapes: dict[
            Tensor, torch.Size
        ] = {}  # of the tensors that are stepped, at first
        # state of whole matrices, by what stands for those that this rank computes
        self.owned_state: State = defaultdict(dict)

    @property
    def schedules(self) -> list[Schedule]:
        """Which rank computes which matrices, and what is sent, for each group of ranks."""
        return [exchange.schedule for exchange in self.exchanges]

    def measure(self, record: RuleRecord | None) -> None:
        """Report the following steps to ``record``; None stops measuring."""
        self.record = record
        for exchange in self.exchanges:
            exchange.redistribution.measure(record)

    def buffers(self) -> Iterator[Tensor]:
        """Yield the tensors that stay in memory between steps, other than weights and state."""
        for exchange in self.exchanges[:1]:  # others share its buffers
            yield from exchange.redistribution.buffers.values()

    @property
    def params(self) -> list[Tensor]:
        """The tensors that this rank steps, in the order of their shards."""
        return [shard.main for shard in self.shards if shard.main is not None]

    def attach(self, groups: Sequence[ParamGroup]) -> None:
        """Take up which shards the parameters of each group are."""
        number_of = {shard.main: number for number, shard in enumerate(self.shards)}
        self.shard_numbers = [[number_of.get(p) for p in group["params"]] for group in groups]
        self._first_shapes = {
            param: self._first_shapes.get(param, param.shape) for param in self.params
        }
        # shards that are empty on this rank were in a group when they were the model's parameters
        for group, numbers in enumerate(self.shard_numbers):
            self.group_of |= {number: group for number in numbers if number is not None}

    def check_shapes(self) -> None:
        """Raise a ConfigurationError if a parameter has got another shape since the build."""
        if self.host is not None:
            return  # it replaces tensors by empty ones
        for shard in self.shards:
            main = shard.main
            if main is not None and main.shape != (
                before := self._first_shapes.get(main, main.shape)
            ):
                rule = f"had the shape {tuple(before)} when the optimizer was built"
                hint = "Build the optimizer again after a change of shape"
                raise ConfigurationError(shard.name, tuple(main.shape), rule, hint)

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Create the state of every parameter, as far as possible without a step."""

    def off_load(
        self, groups: Sequence[ParamGroup], state: State, settings: OffloadSettings
    ) -> None:
        """Keep a fraction of weights and state in host memory from now on."""
        sizes = {param: param.numel() for _, param, _ in self.numbered(groups)}
        params = settings.chosen(sizes)
        weights = settings.movable.intersection(params)
        self.host = HostMemory(params, weights, settings, self.is_sharded_like_param)
        self.host.write_back(params, state)
        self.host.wait_for_write_back()

    def allocate_for_load(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Create all state that is about to be loaded, in the form that checkpoints have."""
        self.init(groups, state)

    def saved_form(self, number: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of shard ``number`` in the form that checkpoints have."""
        return values

    def pack(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Convert loaded state to the form that :meth:`init` creates; collective."""

    def refuse_unsaved(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Raise a ConfigurationError for state that Megatron's checkpoints would not have."""

    def counting(self, groups: Sequence[ParamGroup], state: State) -> Iterator[dict[str, Any]]:
        """Yield the dictionaries (states or groups) that hold step counters."""
        for _, param, _ in self.numbered(groups):
            if STEP in state[param]:
                yield state[param]

    def forget_state(self, number: int) -> None:
        """Clear the state of a parameter's matrices, if this rank has it by :attr:`owned_state`."""

    def scale_gradients(self, factor: Tensor | None) -> None:
        """Set :attr:`grad_scale`, as the chain does for a step (``clipped`` of gradients.py)."""
        self.grad_scale = factor
        if self.one_pass is not None:
            self.one_pass.grad_scale = factor

    def set_steps(self, groups: Sequence[ParamGroup], state: State, steps: int) -> None:
        """Set all step counters to ``steps``, to continue another run."""
        for values in self.counting(groups, state):
            set_step(values, steps)

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of ``groups``; collective."""
        raise NotImplementedError

    def is_sharded_like_param(self, kind: str, value: Any, param: Tensor) -> bool:
        """Whether a state value has an element for each of the tensor's; step counts have not.

        Args:
            kind: The kind of state.
            value: The value.
            param: The tensor that is stepped.
        """
        # a parameter that is a single number may have no dimensions, and neither has its state
        has_elements = isinstance(value, Tensor) and (value.dim() > 0 or param.dim() == 0)
        return has_elements and kind != STEP

    def unsharded_state(
        self, groups: Sequence[ParamGroup], state: State
    ) -> Iterator[UnshardedState]:
        """Yield all state that is not sharded like its parameter, except step counters."""
        return iter(())

    def numbered(self, groups: Sequence[ParamGroup]) -> Iterator[tuple[ParamGroup, Tensor, int]]:
        """Yield every parameter of this update rule, with its group and the index of its shard."""
        for group, numbers in zip(groups, self.shard_numbers, strict=True):
            for param, number in zip(group["params"], numbers, strict=True):
                if number is not None:
                    yield group, param, number


def ids_of(groups: Sequence[ParamGroup]) -> list[list[int]]:
    """Return what tells whether groups have the same tensors as before."""
    # by id, since `==` of tensors compares elements
    return [[id(param) for param in group["params"]] for group in groups]


def refuse_copy(optimizer: Any) -> NoReturn:
    """Raise a ConfigurationTypeError in place of copying or pickling an optimizer."""
    rule = "cannot be copied or pickled, because it belongs to a model and to groups of processes"
    hint = "Save its state_dict(), and load it into an optimizer that is built over the copy"
    raise ConfigurationTypeError("optimizer", type(optimizer).__name__, rule, hint)


def check_may_step(optimizer: Any) -> None:
    """Raise a ConfigurationError if the optimizer is superseded or a group has no learning rate."""
    if getattr(optimizer, "superseded", False):
        rule = "an optimizer that was built later owns some of its parameters"
        hint = "Use the later one, or freeze the other's parameters while each is built"
        raise ConfigurationError("optimizer.step", type(optimizer).__name__, rule, hint)
    for group in optimizer.param_groups:
        if group.get("lr", 0.0) is None:
            check_rates([group], "Set lr in the configuration, or step a scheduler first")


def check_rates(groups: Iterable[ParamGroup], hint: str) -> None:
    """Raise a ConfigurationError if a group has no learning rate."""
    for group in groups:
        if group.get("lr", 0.0) is None:
            rule = f"must be set before a step, but group {group.get('group_id')!r} has none"
            raise ConfigurationError("lr", None, rule, hint)


def refuse_group(param_group: ParamGroup) -> None:
    """Raise a ConfigurationError in place of ``add_param_group``."""
    raise fixed("add_param_group", f"{len(list(param_group.get('params', ())))} parameters")


def fixed(argument: str, value: str) -> ConfigurationError:
    """Return the error for a change of the number of groups."""
    rule = "groups are fixed, because work is assigned to ranks when the optimizer is built"
    return ConfigurationError(argument, value, rule, "Build the optimizer again")


def refuse_state(*_: Any) -> NoReturn:
    """Raise a ConfigurationError; torch calls it before a wrapped optimizer's ``state_dict``."""
    rule = "has no state of its own, because the wrapping optimizer shards it over ranks"
    hint = "Use sharded_state_dict or save_state_dict_to_file of the wrapping optimizer"
    raise ConfigurationError("state_dict", "a wrapped optimizer", rule, hint)


def set_step(state: dict[str, Any], steps: int) -> None:
    """Set the step counter of one state, if it has one, keeping its type."""
    if isinstance(state.get(STEP), Tensor):
        # a separate tensor for each state, because torch counts in place
        state[STEP] = torch.full_like(state[STEP], steps)
    elif STEP in state:
        state[STEP] = steps


def step_inside(optimizer: torch.optim.Optimizer, *, as_class: bool = False) -> None:
    """Step an optimizer as a part of another one's step, with its own hooks.

    torch's global hooks and profilers, which count steps, see only the other one's. ``as_class``
    passes over a method ``step`` that the object has itself.
    """
    if "step" in vars(optimizer) and not as_class:
        optimizer.step()
        return
    step = type(optimizer).step
    for before in optimizer._optimizer_step_pre_hooks.values():
        before(optimizer, (optimizer,), {})
    getattr(step, "__wrapped__", step)(optimizer)
    for after in optimizer._optimizer_step_post_hooks.values():
        after(optimizer, (optimizer,), {})


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return the loss of ``closure``, called with gradients enabled; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def bind(
    optimizer: torch.optim.Optimizer, groups: Iterable[ParamGroup], state: State
) -> torch.optim.Optimizer:
    """Make ``optimizer`` use these groups and this state from now on, and return it."""
    # torch's `add_param_group` and `load_state_dict` would copy or check them
    optimizer.param_groups = list(groups)
    optimizer.state = state
    return optimizer


@contextmanager
def bound[T: torch.optim.Optimizer](
    optimizer: T, groups: Iterable[ParamGroup], state: State
) -> Iterator[T]:
    """Make ``optimizer`` use these groups and this state in a block, and its own afterwards."""
    before = optimizer.param_groups, optimizer.state
    optimizer.param_groups, optimizer.state = list(groups), state
    try:
        yield optimizer
    finally:
        optimizer.param_groups, optimizer.state = before


def empty_states(optimizer: Any) -> list[tuple[dict[str, Any], Tensor]]:
    """Return ``(state, parameter)`` for every parameter whose state is empty."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [(optimizer.state[param], param) for param in params if not optimizer.state[param]]


def zeros(*names: str, **counters: int) -> Callable[..., None]:
    """Return an ``init_state_fn`` that creates counters, and zeros in the parameter's shape."""

    def init_state(optimizer: Any, config: Any = None) -> None:
        for state, param in empty_states(optimizer):
            state.update(counters, **{name: torch.zeros_like(param.data) for name in names})

    return init_state


@torch.no_grad()
def dry_step(optimizer: Any) -> None:
    """Create missing state of the right shape, to load into, by a step with zero gradients.

    Parameters, gradients and groups are restored afterwards; the values of the state are arbitrary.

    Raises:
        ConfigurationError: If the optimizer cannot step with zero gradients.
    """
    everything = [param for group in optimizer.param_groups for param in group["params"]]
    bare = [param for _, param in empty_states(optimizer)]
    if not bare:
        return
    values = [param.detach().clone() for param in bare]
    grads = [param.grad for param in everything]
    groups = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        # a scheduler may set it later, but a step needs a number
        group["lr"] = 0.0 if group.get("lr") is None else group["lr"]
    for param in everything:
        # tensors that have state must not step, and keep it
        param.grad = None
    for param in bare:
        param.grad = torch.zeros_like(param)
    try:
        with matmul_precision():
            step_inside(optimizer)
    except Exception as error:
        name = type(optimizer).__name__
        rule = f"creates its state in its first step, which failed with zero gradients: {error}"
        hint = "Provide an init_state_fn that creates its state"
        raise ConfigurationError("optimizers", name, rule, hint) from error
    finally:
        for param, value in zip(bare, values, strict=True):
            param.detach().copy_(value)
        for param, grad in zip(everything, grads, strict=True):
            param.grad = grad
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update(before)
