"""Adaptive Muon over any storage: orthogonal factors divided by second moments, then scaled."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_eopt.base.names import MOMENT2, MOMENTUM, STEP
from megatron_eopt.math.moments import Moment2MethodT
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.adaptive_rules import RULES, Rule
from megatron_eopt.optimizers.driver import Kept, ParamGroup, State
from megatron_eopt.optimizers.engine import Means, UpdateT
from megatron_eopt.optimizers.muon_driver import MuonDriver, MuonSettings, Stepped
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
        kind, correct = RULES[settings.method], settings.bias_correction
        self._rules: list[Rule] = [
            kind(engine, [shards[n] for n in numbers], settings.orthogonalization, correct)
            for numbers, engine in self.engines
        ]
        self._rule_of = {
            number: (rule, index)
            for (numbers, _), rule in zip(self.engines, self._rules, strict=True)
            for index, number in enumerate(numbers)
        }
        self._groups: Sequence[ParamGroup] = ()
        if settings.bias_correction:
            self.dispensable -= {STEP}

    def buffers(self) -> Iterator[Tensor]:
        """Yield what lives on between steps."""
        yield from super().buffers()
        for rule in self._rules:
            yield from rule.buffers()

    def is_cut_like_weights(self, kind: str, value: object) -> bool:
        """Whether a state has a number for each of the parameter's."""
        return kind == MOMENTUM or (kind == MOMENT2 and self._is_by_element)

    @property
    def _is_by_element(self) -> bool:
        return self.settings.method == "adamuon"

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make momenta, statistics and counters exist."""
        super().init(groups, state)
        for _, param, number in self.numbered(groups):
            state[param].setdefault(MOMENT2, self._empty_statistics(param, number))

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of ``groups``; all ranks of a group call this together."""
        self._groups = groups
        super().step(groups, state)

    def kept(self, groups: Sequence[ParamGroup], state: State) -> Iterator[Kept]:
        """Yield the statistics of NorMuon and NAMO, which all ranks that store a weight have."""
        if self._is_by_element:
            return
        for _, param, number in self.numbered(groups):
            rule, place = self._rule_of[number]
            shard, rank = self.shards[number], rule.engine.ranks.rank
            slab = (rank, shard.ranks.size) if rule.engine.blockwise else shard.slab
            first = min(int(layout.boxes.rank.min()) for layout in shard.layouts)
            writes = rule.engine.blockwise or rank == first
            for matrix, view in enumerate(rule.views_of(place, state[param][MOMENT2])):
                path, container = (MOMENT2,), state[param]
                yield Kept(
                    number, matrix, path, view, writes=writes, slab=slab, container=container
                )

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
            self._orthogonalize(place, stack, matrices, reduce, shape)
            self._rules[place].on_orthogonal(stack, matrices, reduce, shape)

        return update

    def _begin(self, place: int, stepped: Mapping[int, Stepped], state: State) -> None:
        groups = [self._groups[self.group_of[number]] for number in self.engines[place][0]]
        states = {self._rule_of[n][1]: state[item.param] for n, item in stepped.items()}
        self._rules[place].begin(states, groups)

    def _inputs(
        self, place: int, wave: int, stepped: Mapping[int, Stepped], state: State
    ) -> Mapping[int, Tensor]:
        found = self._directions(self._arriving(place, wave), stepped, state)
        moving = {self._rule_of[n][1]: (item.param.grad, found[n]) for n, item in stepped.items()}
        self._rules[place].on_wave(wave, moving)  # type: ignore[arg-type]
        return found

    def _returned(self, place: int, updates: Mapping[int, Tensor]) -> None:
        self._rules[place].finish({self._rule_of[n][1]: u for n, u in updates.items()})

    def _end(self, place: int) -> None:
        self._rules[place].end()

    @property
    def _counts_steps(self) -> bool:
        return self.settings.bias_correction or super()._counts_steps
