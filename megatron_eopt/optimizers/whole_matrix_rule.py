"""The update rule of optimizers whose state needs whole matrices, such as SOAP.

Each logical matrix has an owner rank, the only one that keeps its state and runs the optimizer on
it. Wave by wave, gradients and weights are sent to owners in float32, and weights are sent back.
Owners keep no weights between steps. Matrices of equal shape in a wave are updated together.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from megatron_eopt.base.address import address_of
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import ELEMENT_WISE_STATE, STEP
from megatron_eopt.base.nested_state import by_rows, leaves
from megatron_eopt.optimizers.exchange import ExchangeConfig, MatrixExchange, ParamWithGrad
from megatron_eopt.optimizers.host_memory import HostMemory, OffloadSettings
from megatron_eopt.optimizers.update_rule import (
    OF_GROUPS,
    ParamGroup,
    State,
    UnshardedState,
    UpdateRule,
    bound,
    dry_step,
    step_inside,
)
from megatron_eopt.storage.shard import ParamShard


class WholeMatrixRule(UpdateRule):
    """Runs a torch optimizer on whole matrices, each on its owner rank.

    One group of ranks stores all shards. ``init_state_fn`` creates the state of the optimizer's
    parameters. ``shapes`` has the shape of each whole parameter, for those that are one matrix.
    ``fault_in`` returns why the optimizer cannot start from whole weights, or None if it can.
    """

    counts_matrices = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        init_state_fn: Callable[[], None] | None,
        shards: Sequence[ParamShard],
        shapes: Sequence[tuple[int, ...]],
        exchange_config: ExchangeConfig,
        fault_in: Callable[[Sequence[Tensor]], str | None] | None = None,
    ) -> None:
        super().__init__(type(optimizer).__name__, shards)
        self._optimizer = optimizer
        self._init_state_fn = init_state_fn
        self._fault_in = fault_in
        # each matrix whole on one rank, whatever else the storage would allow
        exchange_config = ExchangeConfig(
            "exchange",
            exchange_config.matrix_buffer_mb,
            whole_only=True,
            device=exchange_config.device,
        )
        self.exchange = MatrixExchange(
            shards, self._update, exchange_config, operands=("grad of ", "weight of ")
        )
        self.exchanges = [self.exchange]
        self._of_matrix = [
            (n, m) for n, shard in enumerate(shards) for m in range(len(shard.layouts))
        ]
        self._shapes = [
            shapes[n] if len(shards[n].layouts) == 1 else shards[n].layouts[m].shape
            for n, m in self._of_matrix
        ]
        schedule = self.exchange.schedule
        # this rank's matrices by index; they hold data only while they are updated
        self.owned: dict[int, nn.Parameter] = {
            # the optimizer needs parameters to which its state belongs
            index: nn.Parameter(torch.empty(0, device=self.exchange.device))
            for wave in schedule.plan.waves
            for index in schedule.computed(wave)
        }
        self.owned_state = defaultdict(dict, {param: {} for param in self.owned.values()})
        self._own_groups: list[ParamGroup] = []
        self._has_begun = False  # the same on all ranks, because it is collective
        # what is done with each batch, and the groups it starts from, because they may count steps
        self._act: Callable[[], None] = self._create_and_step
        self._counters: list[ParamGroup] = []

    def attach(self, groups: Sequence[ParamGroup]) -> None:
        """Take up which shards the parameters of each group are."""
        super().attach(groups)
        self._own_groups = [{"params": []} for _ in groups]

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Create the state of owned matrices, as far as possible without a step."""
        self._update_settings(groups)
        # weights travel to their owners, so this is collective, and all ranks decide alike
        has_a_beginning = self._init_state_fn is not None or self._fault_in is not None
        if has_a_beginning and not self._has_begun:
            self._run(groups, self._begin, with_grads=False)
            self._has_begun = True
            self._fault_in = None  # weights are checked only once, at construction

    def _begin(self) -> None:
        """Check the weights of a batch, and create its state."""
        params = [param for group in self._optimizer.param_groups for param in group["params"]]
        if self._fault_in is not None and self._fault_in(params) is not None:
            index_of = {param: index for index, param in self.owned.items()}
            for param in params:
                if (reason := self._fault_in([param])) is not None:
                    self.faults.append((self.exchange.names[index_of[param]], reason))
        if not self.faults:
            self._create()

    def _create(self) -> None:
        """Create the state of those matrices of a batch that have none."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        if self._init_state_fn is None or all(state[p] for g in groups for p in g["params"]):
            return
        bare = [{**g, "params": [p for p in g["params"] if not state[p]]} for g in groups]
        with bound(self._optimizer, bare, state):
            self._init_state_fn()

    def _complete(self) -> None:
        self._create()
        dry_step(self._optimizer)

    def _create_and_step(self) -> None:
        self._create()
        step_inside(self._optimizer)

    def forget_state(self, number: int) -> None:
        """Clear the state of a parameter's matrices."""
        for index, param in self.owned.items():
            if self._of_matrix[index][0] == number:
                self.owned_state[param].clear()

    def allocate_for_load(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Create all state of owned matrices, including what a first step would create."""
        self.init(groups, state)
        self._run(groups, self._complete, with_grads=False)

    def counting(self, groups: Sequence[ParamGroup], state: State) -> Iterator[dict[str, Any]]:
        """Yield the dictionaries (groups, states of owned matrices) that hold step counters."""
        yield from (own for own in self._own_groups if STEP in own)
        yield from (values for values in self.owned_state.values() if STEP in values)

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of ``groups``; collective.

        Raises:
            ConfigurationError: If a parameter has no gradient.
        """
        self._refuse_missing(groups)
        self._update_settings(groups)
        self._run(groups, self._create_and_step, with_grads=True)

    def unsharded_state(
        self, groups: Sequence[ParamGroup], state: State
    ) -> Iterator[UnshardedState]:
        """Yield the state of the matrices that this rank owns."""
        self._update_settings(groups)
        for index, param in self.owned.items():
            number, matrix = self._of_matrix[index]
            own_group, own_state = self._own_groups[self.group_of[number]], self.owned_state[param]
            # what an optimizer keeps in its group besides the run's settings, such as a counter of
            # its own
            counters = own_group.keys() - groups[self.group_of[number]].keys() - {"params", STEP}
            for path, value in leaves(own_state):
                if path != (STEP,):
                    whole = isinstance(value, Tensor) and value.shape == self._shapes[index]
                    per_element = whole and ".".join(path) in ELEMENT_WISE_STATE
                    yield UnshardedState(
                        number, matrix, path, value, per_element=per_element, container=own_state
                    )
            for path, value in leaves({name: own_group[name] for name in sorted(counters)}):
                place = {OF_GROUPS: own_group}
                yield UnshardedState(number, matrix, (OF_GROUPS, *path), value, container=place)

    def off_load(
        self, groups: Sequence[ParamGroup], state: State, settings: OffloadSettings
    ) -> None:
        """Keep a fraction of weights, and of the state of owned matrices, in host memory."""
        weights = settings.chosen({param: param.numel() for _, param, _ in self.numbered(groups)})
        sizes = {param: math.prod(self._shapes[index]) for index, param in self.owned.items()}
        owned = settings.chosen(sizes)
        self.host = HostMemory([*weights, *owned], settings.movable.intersection(weights), settings)
        self.host.write_back(self.host.params, self.owned_state)
        self.host.wait_for_write_back()

    def counts(self) -> Iterator[UnshardedState]:
        """Yield the step counters of the matrices that this rank owns."""
        for index, param in self.owned.items():
            state = self.owned_state[param]
            if STEP in state:
                yield UnshardedState(*self._of_matrix[index], (STEP,), state[STEP], container=state)

    def _refuse_missing(self, groups: Sequence[ParamGroup]) -> None:
        missing = [
            self.shards[n].name for _, param, n in self.numbered(groups) if param.grad is None
        ]
        if missing:
            rule = f"{self.name} updates all matrices in each step, but these have no gradient"
            hint = "Set requires_grad=False on them before building the optimizer"
            raise ConfigurationError("grad", missing[:8], rule, hint)

    def _run(
        self, groups: Sequence[ParamGroup], act: Callable[[], None], *, with_grads: bool
    ) -> None:
        """Send matrices to their owners, call ``act`` on them there, and send them back."""
        items = {n: ParamWithGrad(n, group, param, {}) for group, param, n in self.numbered(groups)}
        self._act, self._counters = act, [dict(own) for own in self._own_groups]

        def tensors(members: Mapping[int, ParamWithGrad], *_: Any) -> dict[int, Tensor]:
            inputs = {2 * n + 1: item.param.detach() for n, item in members.items()}
            # to create state, the zeros that are sent otherwise will do
            for n, item in members.items() if with_grads else ():
                assert item.param.grad is not None
                inputs[2 * n] = item.param.grad
            return inputs

        def apply(arrived: Sequence[ParamWithGrad], weights: Mapping[int, Tensor]) -> None:
            if with_grads and arrived:
                new = [weights[item.number] for item in arrived]
                torch._foreach_copy_([item.param for item in arrived], new)

        self.exchange.run(
            items, tensors, apply, self.host, owned=self.owned, owned_state=self.owned_state
        )

    def _update(self, stack: Tensor, matrices: Sequence[int], *_: Any) -> None:
        """Call ``act`` on the optimizer with matrices as its parameters, in place."""
        places = {}
        groups = [{**own, "params": []} for own in self._counters]
        # in the order of the model, in which some optimizers draw random numbers
        for index, (grad, weight) in sorted(
            zip(matrices, torch.split(stack, 2), strict=True), key=itemgetter(0)
        ):
            param, shape = self.owned[index], self._shapes[index]
            # views of the stack, so that the optimizer's step writes what is sent back
            param.data, param.grad = weight.view(shape), grad.view(shape)
            places[param] = param.data
            groups[self.group_of[self._of_matrix[index][0]]]["params"].append(param)
        with bound(self._optimizer, groups, self.owned_state) as optimizer:
            self._act()
            for number, group in enumerate(optimizer.param_groups):
                # only groups with parameters in the batch have counted this step
                if group["params"]:
                    self._own_groups[number] = {**group, "params": []}
        for param, place in places.items():
            by_rows(self.owned_state[param])
            # some optimizers assign `data`, and leave the stack as it was
            if address_of(param) != address_of(place):
                place.copy_(param.detach())
            # the next wave will overwrite the stack; between steps owners keep state only
            param.data, param.grad = place.new_empty(0), None

    def _update_settings(self, groups: Sequence[ParamGroup]) -> None:
        """Copy current settings, such as scheduled learning rates, from ``groups``."""
        for own, group in zip(self._own_groups, groups, strict=True):
            # not replaced, because owners' groups also have counters that only they know
            own.update({key: value for key, value in group.items() if key != "params"})
