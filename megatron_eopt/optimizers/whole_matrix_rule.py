"""The update rule of optimizers whose state needs whole matrices, such as SOAP.

Each logical matrix has an owner rank, the only one that keeps its state and runs the optimizer on
it. Wave by wave, gradients and weights are sent to owners in float32, and weights are sent back.
Owners keep no weights between steps. Matrices of equal shape in a wave are updated together.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron_eopt.base.address import address_of
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import ELEMENT_WISE_STATE, STEP
from megatron_eopt.base.nested_state import by_rows, leaves
from megatron_eopt.layouts import Matrix, Redistribution, WaveBatch
from megatron_eopt.optimizers.exchange import ExchangeConfig
from megatron_eopt.optimizers.host_memory import HostMemory, OffloadSettings
from megatron_eopt.optimizers.modes import Schedule, place_matrices
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

_GRAD, _WEIGHT = "grad of ", "weight of "


class WholeMatrixRule(UpdateRule):
    """Runs a torch optimizer on whole matrices, each on its owner rank.

    One group of ranks stores all shards. ``init_state_fn`` creates the state of the optimizer's
    parameters. ``shapes`` has the shape of each whole parameter, for those that are one matrix.
    ``fault_in`` returns why the optimizer cannot start from whole weights, or None if it can.
    """

    counts_matrices = True
    redistribution: Redistribution

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
        self._device = torch.device(exchange_config.device)
        self._ranks = shards[0].ranks
        self._names = [name for shard in shards for name in shard.matrix_names]
        self._of_matrix = [
            (n, m) for n, shard in enumerate(shards) for m in range(len(shard.layouts))
        ]
        self._shapes = [
            shapes[n] if len(shards[n].layouts) == 1 else shards[n].layouts[m].shape
            for n, m in self._of_matrix
        ]
        self.redistribution = self._plan(exchange_config)
        plan = self.redistribution.plan
        # this rank's matrices by index; they hold data only while they are updated
        self.owned: dict[int, nn.Parameter] = {
            # the optimizer needs parameters to which its state belongs; gradient 2 i and weight 2 i
            # + 1 are matrix i
            index // 2: nn.Parameter(torch.empty(0, device=self._device))
            for wave in plan.waves
            for batch in wave.batches
            for index in batch.matrices
        }
        self.owned_state = defaultdict(dict, {param: {} for param in self.owned.values()})
        # in the order in which the redistribution computes them, so that the next one can be
        # prefetched
        self._batches = [
            [self.owned[index] for index in sorted({i // 2 for i in batch.matrices})]
            for wave in plan.waves
            for batch in wave.batches
        ]
        self._own_groups: list[ParamGroup] = []
        self._has_begun = False  # the same on all ranks, because it is collective

    @property
    def schedules(self) -> list[Schedule]:
        """Which rank updates which matrices, and what is sent."""
        storage = [layout for shard in self.shards for layout in shard.layouts]
        plan = self.redistribution.plan
        return [Schedule(self._ranks, self._names, storage, self._placements, plan, tensors=2)]

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
                    self.faults.append((self._names[index_of[param]], reason))
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
            own, kept = self._own_groups[self.group_of[number]], self.owned_state[param]
            # what an optimizer keeps in its group besides the run's settings, such as a counter of
            # its own
            counters = own.keys() - groups[self.group_of[number]].keys() - {"params", STEP}
            for path, value in leaves(kept):
                if path != (STEP,):
                    whole = isinstance(value, Tensor) and value.shape == self._shapes[index]
                    per_element = whole and ".".join(path) in ELEMENT_WISE_STATE
                    yield UnshardedState(
                        number, matrix, path, value, per_element=per_element, container=kept
                    )
            for path, value in leaves({name: own[name] for name in sorted(counters)}):
                place = {OF_GROUPS: own}
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

    def _plan(self, exchange_config: ExchangeConfig) -> Redistribution:
        """Plan how gradient ``2 i`` and weight ``2 i + 1`` of each matrix ``i`` are sent."""
        layouts = [layout for shard in self.shards for layout in shard.layouts]
        # a wave holds gradient and weight of each matrix
        self._placements, waves = place_matrices(
            layouts, self._ranks.size, "exchange", exchange_config.wave_bytes // 2
        )
        stored_in = [shard.name for shard in self.shards for _ in shard.layouts]
        pairs = zip(self._names, layouts, self._placements, stored_in, strict=True)
        matrices = [
            Matrix(kind + name, layout, item.compute, kind + tensor, returns=kind == _WEIGHT)
            for name, layout, item, tensor in pairs
            for kind in (_GRAD, _WEIGHT)
        ]
        pairs_of_waves = [[index for i in wave for index in (2 * i, 2 * i + 1)] for wave in waves]
        return Redistribution(
            matrices, pairs_of_waves, self._ranks.group, device=self._device, name=self.name
        )

    def _run(self, groups: Sequence[ParamGroup], act: Any, *, with_grads: bool) -> None:
        """Send matrices to their owners, call ``act`` on them there, and send them back."""
        params = {self.shards[n].name: param for _, param, n in self.numbered(groups)}
        counters = [dict(own) for own in self._own_groups]
        following = iter([*self._batches[1:], []])

        def weights(names: Iterable[str]) -> list[Tensor]:
            own = (name.removeprefix(_WEIGHT) for name in names if name.startswith(_WEIGHT))
            return [params[name] for name in own]

        def load(wave: int, names: Sequence[str]) -> dict[str, Tensor]:
            return {name: loaded(name).contiguous() for name in names}

        def loaded(name: str) -> Tensor:
            if name.startswith(_WEIGHT):
                return params[name.removeprefix(_WEIGHT)].detach()
            param = params[name.removeprefix(_GRAD)]
            # the plan sends both; to create state, zeros will do
            grad = param.grad if with_grads else torch.zeros_like(param)
            assert grad is not None
            return grad

        def compute(batch: WaveBatch) -> None:
            members = self._lay_out(batch)
            owned = [param for param, _ in members.values()]
            if self.host is not None:
                self.host.fetch(owned, self.owned_state)
                self.host.announce(next(following), self.owned_state)
            # groups may count steps, so every batch starts from the same groups
            groups = [{**own, "params": []} for own in counters]
            for index, (param, _) in members.items():
                groups[self.group_of[self._of_matrix[index][0]]]["params"].append(param)
            with bound(self._optimizer, groups, self.owned_state) as optimizer:
                act()
                for number, group in enumerate(optimizer.param_groups):
                    # only groups with parameters in the batch have counted this step
                    if group["params"]:
                        self._own_groups[number] = {**group, "params": []}
            for param, place in members.values():
                by_rows(self.owned_state[param])
                # some optimizers assign `data`, and leave the stack as it was
                if address_of(param) != address_of(place):
                    place.copy_(param.detach())
                # the next wave will overwrite the stack; between steps owners keep state only
                param.data, param.grad = place.new_empty(0), None
            if self.host is not None:
                self.host.write_back(owned, self.owned_state)

        def store(results: Mapping[str, Tensor]) -> None:
            # gradients are not sent back
            own = weights(results)
            if with_grads and own:
                new = [value.view_as(p) for value, p in zip(results.values(), own, strict=True)]
                torch._foreach_copy_(own, new)

        moving = (
            nullcontext((load, store))
            if self.host is None
            else self.host.moving(
                load, store, weights, self.redistribution.arriving, self.owned_state
            )
        )
        with moving as (load_moved, store_moved):
            self.redistribution.run(load_moved, compute, store_moved)

    def _lay_out(self, batch: WaveBatch) -> dict[int, tuple[nn.Parameter, Tensor]]:
        """Make owned parameters use the matrices of a batch; return both by matrix index."""
        places = dict(zip(batch.matrices, batch.tensor, strict=True))
        members = {}
        for index in sorted({i // 2 for i in places}):
            shape = self._shapes[index]
            param, weight = self.owned[index], places[2 * index + 1].view(shape)
            # views of the stack, so that the optimizer's step writes what is sent back
            param.data = weight
            param.grad = places[2 * index].view(shape)
            members[index] = (param, weight)
        return members

    def _update_settings(self, groups: Sequence[ParamGroup]) -> None:
        """Copy current settings, such as scheduled learning rates, from ``groups``."""
        for own, group in zip(self._own_groups, groups, strict=True):
            # not replaced, because owners' groups also have counters that only they know
            own.update({key: value for key, value in group.items() if key != "params"})
