"""Muon over any storage: momentum where the weights are, matrices whole while they are computed.

Weight decay, momentum and the update itself are element by element and do not care how a matrix is
stored, so they act on what a rank stores. Only directions travel, and come back as updates.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.names import MOMENTUM, MOMENTUM_SCALE, STEP
from megatron_eopt.layouts import Redistribution
from megatron_eopt.math.low_precision import MomentumDtypeT
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.orthogonalize import Orthogonalization
from megatron_eopt.optimizers.driver import Driver, ParamGroup, State
from megatron_eopt.optimizers.element_wise import set_step
from megatron_eopt.optimizers.engine import Means, UpdateT, engines_of
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.optimizers.momentum import momentum_in
from megatron_eopt.optimizers.muon_arithmetic import (
    WeightDecayT,
    decay_rate,
    directions,
    gradients,
    shrink,
    subtract,
)
from megatron_eopt.optimizers.watch import ORTHOGONALIZATION
from megatron_eopt.stores.shard import Shard

type OrthogonalizeT = Callable[[Tensor, Tensor, ParamGroup], Tensor]
"""A subclass's own way: gets a parameter, what to orthogonalize and its group; returns the update.
"""

type Apply = Callable[[ParamGroup, Sequence[Tensor], Sequence[Tensor], float], None]
"""Shrinks parameters of one group by a rate, and subtracts updates from them."""


@dataclass(frozen=True)
class MuonSettings:
    """What the parameters of a Muon have in common."""

    nesterov: bool  # orthogonalize gradient and momentum mixed instead of the momentum alone
    weight_decay_method: WeightDecayT
    orthogonalization: Orthogonalization  # the arithmetic on matrices
    momentum_dtype: MomentumDtypeT  # how momentum is kept between steps


@dataclass
class Stepped:
    """A parameter that has a gradient in this step."""

    group: ParamGroup
    param: Tensor
    number: int


class MuonDriver(Driver):
    """Steps Muon; see Note [Phases of a step]. The dtype of ``means`` is the arithmetic's."""

    needs_matrices = True
    tells_updates = True

    def __init__(
        self, name: str, settings: MuonSettings, shards: Sequence[Shard], means: Means
    ) -> None:
        super().__init__(name, shards)
        self.settings = settings
        self._dtype = means.dtype
        self._numbers = {shard.name: number for number, shard in enumerate(shards)}
        self.engines = engines_of(shards, self._update_of, means)
        self.momentum = momentum_in(settings.momentum_dtype, shards, means.device)
        if self.momentum.is_rounded:
            self.dispensable = frozenset({MOMENTUM_SCALE, STEP})
        self.apply: Apply = subtract  # a class's hooks may do more
        self.own: OrthogonalizeT | None = None  # takes the place of our orthogonalization

    @property
    def schedules(self) -> list[Schedule]:
        """Who computes which matrices, and what travels, for each group of ranks."""
        return [engine.schedule for _, engine in self.engines]

    @property
    def redistributions(self) -> list[Redistribution]:
        """What brings matrices to where they are computed, and back."""
        return [engine.redistribution for _, engine in self.engines]

    def buffers(self) -> Iterator[Tensor]:
        """Yield what lives on between steps: what matrices travel through, and where rows are."""
        for _, engine in self.engines:
            yield from engine.buffers()
        yield from self.momentum.tensors()

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make every momentum exist, and where it is rounded a counter."""
        for _, param, number in self.numbered(groups):
            if MOMENTUM not in state[param]:
                self.momentum.make(number, state[param], param)
            if self._counts_steps:
                # on the host, so that reading it makes nobody wait
                state[param].setdefault(STEP, torch.zeros((), dtype=torch.float32))

    def expect(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make all state exist that is about to be loaded, as checkpoints have it."""
        self.init(groups, state)
        for _, param, number in self.numbered(groups):
            state[param].update(self.saved_form(number, state[param]))

    def saved_form(self, number: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state with its momentum in float32, which any ``momentum_dtype`` can load."""
        if not self.momentum.is_rounded:
            return values
        kept = {kind: value for kind, value in values.items() if kind != MOMENTUM_SCALE}
        return {**kept, MOMENTUM: self.momentum.read(number, values)}

    @torch.no_grad()
    def pack(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Keep momenta that were loaded in few bits again, if they are; collective."""
        if not self.momentum.is_rounded:
            return
        self.init(groups, state)
        loaded = {
            number: (state[param], self.momentum.read(number, state[param]))
            for _, param, number in self.numbered(groups)
            if not self.momentum.is_kept(state[param])
        }
        self.momentum.write(range(len(self.shards)), loaded, nearest=True)

    def set_steps(self, groups: Sequence[ParamGroup], state: State, steps: int) -> None:
        """Continue to count after ``steps`` steps that another run did."""
        for _, param, _ in self.numbered(groups):
            set_step(state[param], steps)

    def is_cut_like_weights(self, kind: str, value: Any) -> bool:
        """Whether a value in a parameter's state has a number for each of the parameter's."""
        return kind != MOMENTUM_SCALE and super().is_cut_like_weights(kind, value)

    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of ``groups``; all ranks of a group call this together."""
        stepped = {
            number: Stepped(group, param, number)
            for group, param, number in self.numbered(groups)
            if param.grad is not None
        }
        self._count(state[item.param] for item in stepped.values())
        if self.own is not None:
            self.host.fetch((item.param for item in stepped.values()), state)
            self._step_in_its_own_way(self.own, stepped, state)
            self.host.write_back((item.param for item in stepped.values()), state)
        else:
            for place, (numbers, _) in enumerate(self.engines):
                self._step_with(place, {n: stepped[n] for n in numbers if n in stepped}, state)
        self.host.settle()

    def _step_in_its_own_way(
        self, own: OrthogonalizeT, stepped: Mapping[int, Stepped], state: State
    ) -> None:
        found = self._directions(range(len(self.shards)), stepped, state)
        updates = {n: own(stepped[n].param, d, stepped[n].group) for n, d in found.items()}
        self._apply(stepped.values(), updates)

    def _step_with(self, place: int, stepped: Mapping[int, Stepped], state: State) -> None:
        engine = self.engines[place][1]
        if engine.ranks.group is None and not stepped:
            return
        self._prepare(place, stepped, state)

        def params(names: Iterable[str]) -> list[Tensor]:
            numbers = (self._numbers[name] for name in names)
            return [stepped[n].param for n in numbers if n in stepped]

        def load(wave: int, names: Sequence[str]) -> dict[str, Tensor]:
            numbers = [self._numbers[name] for name in names]
            mine = {n: stepped[n] for n in numbers if n in stepped}
            self.host.fetch(params(names), state)
            self.host.announce(params(engine.redistribution.arriving(wave + 1)), state)
            inputs = self._inputs(place, wave, mine, state)
            return {
                name: inputs[n].contiguous()
                if n in inputs
                # in place of one that rests, but is in the plan
                else torch.zeros(self.shards[n].shape, dtype=torch.float32, device=engine.device)
                for name, n in zip(names, numbers, strict=True)
            }

        def store(results: Mapping[str, Tensor]) -> None:
            updates = {self._numbers[name]: update for name, update in results.items()}
            self._finished(place, updates)
            self._apply([stepped[n] for n in updates if n in stepped], updates)
            self.host.write_back(params(results), state)

        engine.run(load, store)

    def _prepare(self, place: int, stepped: Mapping[int, Stepped], state: State) -> None:
        """Begin a step of one engine."""

    def _inputs(
        self, place: int, wave: int, stepped: Mapping[int, Stepped], state: State
    ) -> Mapping[int, Tensor]:
        """Return what to orthogonalize of the parameters that a wave is the first to need."""
        place_of = self.engines[place][1].redistribution.place
        places = {n: place_of(self.shards[n].name) for n in stepped}
        return self._directions(self._arriving(place, wave), stepped, state, self._dtype, places)

    def _finished(self, place: int, updates: Mapping[int, Tensor]) -> None:
        """Act on updates that came back, in place."""

    def _arriving(self, place: int, wave: int) -> list[int]:
        """Return the shards that a wave is the first to need, on any rank."""
        numbers, engine = self.engines[place]
        return [numbers[index] for index in engine.arrivals[wave]]

    def _directions(
        self,
        numbers: Sequence[int],
        stepped: Mapping[int, Stepped],
        state: State,
        dtype: torch.dtype | None = None,
        places: Mapping[int, Tensor | None] | None = None,
    ) -> dict[int, Tensor]:
        """Update momenta and return what to orthogonalize, group by group.

        A class's own way, which is given the weights, finds them decayed.

        ``numbers`` are the shards that may be stepped on any rank; directions may be rounded to
        ``dtype`` and lie at ``places``.
        """
        found: dict[int, Tensor] = {}
        new: dict[int, tuple[dict[str, Any], Tensor]] = {}
        for group, members in _by_group(stepped.values()):
            params = [item.param for item in members]
            grads = gradients(params, group, self.settings.weight_decay_method)
            if self.own is not None:
                shrink(params, self._rate_of(group))
            momenta = [self.momentum.read(item.number, state[item.param]) for item in members]
            if self.momentum.is_rounded:
                grads = [grad.to(kept.dtype) for grad, kept in zip(grads, momenta, strict=True)]
            mixed = directions(
                grads,
                momenta,
                group["momentum"],
                self.settings.nesterov,
                dtype,
                [(places or {}).get(item.number) for item in members],
            )
            found.update(zip((item.number for item in members), mixed, strict=True))
            for item, momentum in zip(members, momenta, strict=True):
                new[item.number] = (state[item.param], momentum)
        self.momentum.write(numbers, new)
        return found

    @property
    def _counts_steps(self) -> bool:
        """Whether each parameter's steps are counted."""
        return self.momentum.is_rounded

    def _count(self, states: Iterable[dict[str, Any]]) -> None:
        if self._counts_steps:
            for values in states:
                values[STEP] += 1

    def _apply(self, stepped: Iterable[Stepped], updates: Mapping[int, Tensor]) -> None:
        for group, members in _by_group(stepped):
            mine = [updates[item.number] for item in members]
            if self.watch is not None:
                self.watch.applied([item.number for item in members], mine)
            rate = 0.0 if self.own is not None else self._rate_of(group)
            self.apply(group, [item.param for item in members], mine, rate)

    def _rate_of(self, group: ParamGroup) -> float:
        return decay_rate(group, self.settings.weight_decay_method)

    def _update_of(self, place: int) -> UpdateT:
        scales = self.settings.orthogonalization.scales

        def update(
            stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
        ) -> None:
            self._orthogonalize(place, matrices, stack, reduce, shape, scales(shape))

        return update

    def _orthogonalize(
        self,
        place: int,
        matrices: Sequence[int],
        stack: Tensor,
        reduce: ReduceT | None,
        shape: tuple[int, int],
        scales: tuple[float, ...] = (),
    ) -> None:
        """Replace a stack of one engine's matrices by orthogonal factors times ``scales``."""
        factors = self.settings.orthogonalization.factors_
        if self.watch is None:
            factors(stack, reduce, shape, scales)
            return
        with self.watch.meter.span(ORTHOGONALIZATION):
            factors(stack, reduce, shape, scales)
        engine = self.engines[place][1]
        share = engine.work.matrices[matrices[0]].share
        among, scale = len(engine.names), math.prod(scales)
        self.watch.orthogonalized(among, matrices, stack, reduce, shape, scale, share)


def _by_group(stepped: Iterable[Stepped]) -> list[tuple[ParamGroup, list[Stepped]]]:
    groups: dict[int, tuple[ParamGroup, list[Stepped]]] = {}
    for item in stepped:
        groups.setdefault(id(item.group), (item.group, []))[1].append(item)
    return list(groups.values())
