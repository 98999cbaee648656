"""Adaptive Muon over any storage: orthogonal factors divided by second moments, then scaled."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import MOMENT2, MOMENTUM, STEP
from megatron_eopt.math.moments import Moment2MethodT, correction
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.adaptive_rules import RULES, Coefficients, Rule
from megatron_eopt.optimizers.driver import Kept, ParamGroup, State, set_step
from megatron_eopt.optimizers.engine import Means, UpdateT
from megatron_eopt.optimizers.muon_driver import MuonDriver, MuonSettings, OrthogonalizeT, Stepped
from megatron_eopt.stores.shard import Shard


@dataclass(frozen=True)
class AdaptiveSettings(MuonSettings):
    """What the parameters of an adaptive Muon have in common."""

    method: Moment2MethodT  # how updates are normalized
    bias_correction: bool  # whether statistics are divided by ``1 - beta2^step``


class AdaptiveDriver(MuonDriver):
    """Steps adaptive Muon; see Note [Where statistics live] in :mod:`.adaptive_rules`."""

    settings: AdaptiveSettings

    def __init__(
        self, name: str, settings: AdaptiveSettings, shards: Sequence[Shard], means: Means
    ) -> None:
        super().__init__(name, settings, shards, means)
        kind = RULES[settings.method]
        self._rules: list[Rule] = [
            kind(engine, [shards[n] for n in numbers], settings.orthogonalization)
            for numbers, engine in self.engines
        ]
        self._rule_of = {
            number: (rule, index)
            for (numbers, _), rule in zip(self.engines, self._rules, strict=True)
            for index, number in enumerate(numbers)
        }
        self._ready: dict[int, tuple[Tensor, Tensor]] = {}
        self._away: dict[int, Tensor] = {}
        self._counted: dict[int, Coefficients] = {}
        # statistics of parameters that this rank computes on but stores nothing of
        self.owned_state: State = defaultdict(dict)
        if settings.bias_correction:
            self.dispensable -= {STEP}

    def buffers(self) -> Iterator[Tensor]:
        """Yield what lives on between steps."""
        yield from super().buffers()
        for rule in self._rules:
            yield from rule.buffers()

    def is_cut_like_weights(self, kind: str, value: Any) -> bool:
        """Whether a state has a number for each of the parameter's."""
        return kind == MOMENTUM or (kind == MOMENT2 and self._is_by_element)

    @property
    def _is_by_element(self) -> bool:
        return self.settings.method == "adamuon"

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make momenta, statistics and counters exist."""
        super().init(groups, state)
        here = {number for _, _, number in self.numbered(groups)}
        for number in self.group_of.keys() - here - self._away.keys():
            rule, place = self._rule_of[number]
            count = 0 if self._is_by_element else len(self.shards[number].layouts)
            if any(rule.known(place, matrix) is not None for matrix in range(count)):
                self._away[number] = torch.empty(0, dtype=torch.float32, device=rule.engine.device)
        for param, number, values in self._states(groups, state):
            values.setdefault(MOMENT2, self._empty_statistics(param, number))
            if self._counts_steps:
                values.setdefault(STEP, torch.zeros((), dtype=torch.float32))

    def counting(self, groups: Sequence[ParamGroup], state: State) -> Iterator[dict[str, Any]]:
        """Yield the states in which steps are counted."""
        yield from (values for *_, values in self._states(groups, state) if STEP in values)

    def set_steps(self, groups: Sequence[ParamGroup], state: State, steps: int) -> None:
        """Set the counters."""
        for *_, values in self._states(groups, state):
            set_step(values, steps)

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of ``groups``; all ranks of a group call this together."""
        self._count(self.owned_state[key] for key in self._away.values())
        self._counted = {
            number: self._coefficients(groups[self.group_of[number]], self.owned_state[key])
            for number, key in self._away.items()
        }
        super().step(groups, state)

    def kept(self, groups: Sequence[ParamGroup], state: State) -> Iterator[Kept]:
        """Yield the statistics of NorMuon and NAMO that this rank knows."""
        if self._is_by_element:
            return
        for *_, number, values in self._states(groups, state):
            rule, place = self._rule_of[number]
            shard = self.shards[number]
            slab = (shard.ranks.rank, shard.ranks.size) if rule.engine.blockwise else shard.slab
            for matrix, view in enumerate(rule.views_of(place, values[MOMENT2])):
                if (known := rule.known(place, matrix)) is not None:
                    cut, start, _ = known.window
                    yield Kept(
                        number,
                        matrix,
                        (MOMENT2,),
                        view.narrow(*known.window),
                        tuple(view.shape),
                        tuple(start if dim == cut else 0 for dim in range(view.dim())),
                        writes=known.writes,
                        slab=slab,
                        container=values,
                    )

    def _states(
        self, groups: Sequence[ParamGroup], state: State
    ) -> Iterator[tuple[Tensor, int, dict[str, Any]]]:
        """Yield the state of each shard that this rank stores or computes on, and its number."""
        for _, param, number in self.numbered(groups):
            yield param, number, state[param]
        for number, key in self._away.items():
            yield key, number, self.owned_state[key]

    def complete(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Bring statistics that other ranks computed up to date; collective."""
        moments = {n: values[MOMENT2] for *_, n, values in self._states(groups, state)}
        for (numbers, _), rule in zip(self.engines, self._rules, strict=True):
            rule.complete({place: moments[n] for place, n in enumerate(numbers) if n in moments})

    def _empty_statistics(self, param: Tensor, number: int) -> Tensor:
        if self._is_by_element:
            return torch.zeros_like(param, requires_grad=False)
        rule, place = self._rule_of[number]
        shapes = rule.statistics[place]
        shape = shapes[0] if len(shapes) == 1 else (sum(map(math.prod, shapes)),)
        return param.new_zeros(shape, requires_grad=False)

    def _update_of(self, place: int) -> UpdateT:
        def update(
            stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
        ) -> None:
            if self.own is None:
                self._orthogonalize(self.engines[place][1], matrices, stack, reduce, shape)
            self._rules[place].on_orthogonal(stack, matrices, reduce, shape)

        return update

    def _step_in_its_own_way(
        self, own: OrthogonalizeT, stepped: Mapping[int, Stepped], state: State
    ) -> None:
        found = self._directions(range(len(self.shards)), stepped, state)
        # before any exchange, since a class's own way may be one itself
        self._ready = {n: (d, own(stepped[n].param, d, stepped[n].group)) for n, d in found.items()}
        for place, (numbers, _) in enumerate(self.engines):
            self._step_with(place, {n: stepped[n] for n in numbers if n in stepped}, state)
        self._ready = {}

    def _prepare(self, place: int, stepped: Mapping[int, Stepped], state: State) -> None:
        states = {n: state[item.param] for n, item in stepped.items()}
        counted = {n: self._coefficients(item.group, states[n]) for n, item in stepped.items()}
        for number in self.engines[place][0]:
            if number in self._away:
                states[number] = self.owned_state[self._away[number]]
                counted[number] = self._counted[number]
        self._rules[place].begin(
            {self._rule_of[n][1]: values for n, values in states.items()},
            {self._rule_of[n][1]: coefficients for n, coefficients in counted.items()},
        )

    def _inputs(
        self, place: int, wave: int, stepped: Mapping[int, Stepped], state: State
    ) -> Mapping[int, Tensor]:
        if self.own is None:
            found = inputs = self._directions(self._arriving(place, wave), stepped, state)
        else:
            found = {n: self._ready[n][0] for n in stepped}
            inputs = {n: self._ready[n][1] for n in stepped}
        moving = {self._rule_of[n][1]: (item.param.grad, found[n]) for n, item in stepped.items()}
        self._rules[place].on_wave(wave, moving)  # type: ignore[arg-type]
        return inputs

    def _finished(self, place: int, updates: Mapping[int, Tensor]) -> None:
        self._rules[place].finish({self._rule_of[n][1]: u for n, u in updates.items()})

    @property
    def _counts_steps(self) -> bool:
        return self.settings.bias_correction or super()._counts_steps

    def _coefficients(self, group: ParamGroup, state: dict[str, Any]) -> Coefficients:
        corrected = self.settings.bias_correction
        step = float(state[STEP]) if corrected else 1
        return Coefficients(
            group["beta2"], group["eps"], correction(group["beta2"], step, corrected)
        )
