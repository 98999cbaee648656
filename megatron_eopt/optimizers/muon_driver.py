"""Muon over any storage: momentum where the weights are, matrices whole while they are computed.

Weight decay, momentum and the update itself are element by element and do not care how a matrix is
stored, so they act on what a rank stores. Only directions travel, and come back as updates.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_eopt.base.names import MOMENTUM, MOMENTUM_SCALE, STEP
from megatron_eopt.layouts import Redistribution
from megatron_eopt.math.low_precision import MomentumDtypeT
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.orthogonalize import Orthogonalization
from megatron_eopt.optimizers.driver import Driver, ParamGroup, State
from megatron_eopt.optimizers.engine import Means, UpdateT, engines_of
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.optimizers.momentum import RoundedMomentum
from megatron_eopt.optimizers.step_stats import ORTHOGONALIZATION, StepStats
from megatron_eopt.stores.shard import Shard

WeightDecayT = Literal["decoupled", "l2", "independent"]
"""How weight decay acts: ``decoupled`` shrinks weights by ``lr * weight_decay`` (AdamW,
arXiv:1711.05101), ``independent`` by ``weight_decay`` whatever the learning rate, ``l2`` adds
``weight_decay * weight`` to the gradient."""

WEIGHT_DECAY_METHODS: tuple[WeightDecayT, ...] = get_args(WeightDecayT)


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

    tells_updates = True

    def __init__(
        self, name: str, settings: MuonSettings, shards: Sequence[Shard], means: Means
    ) -> None:
        super().__init__(name, shards)
        self.settings = settings
        self._dtype = means.dtype
        self._numbers = {shard.name: number for number, shard in enumerate(shards)}
        self.engines = engines_of(shards, self._update_of, means)
        # what keeps momentum in fewer bits between steps
        self.rounding: RoundedMomentum | None = None
        if settings.momentum_dtype != "fp32":
            self.rounding = RoundedMomentum(settings.momentum_dtype, shards, means.device)
            self.dispensable = frozenset({MOMENTUM_SCALE, STEP})
        self._stats: StepStats | None = None

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
        if self.rounding is not None:
            yield from self.rounding.tensors()

    def measure(self, stats: StepStats | None) -> None:
        """Let steps be measured from now on, or no longer."""
        super().measure(stats)
        self._stats = stats

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make every momentum exist, and where it is rounded a counter."""
        for _, param, number in self.numbered(groups):
            if MOMENTUM not in state[param] and self.rounding is not None:
                self.rounding.make(number, state[param], param)
            elif MOMENTUM not in state[param]:
                state[param][MOMENTUM] = torch.zeros_like(param, requires_grad=False)
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
        if self.rounding is None:
            return values
        kept = {kind: value for kind, value in values.items() if kind != MOMENTUM_SCALE}
        return {**kept, MOMENTUM: self.rounding.read(number, values)}

    @torch.no_grad()
    def pack(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Keep momenta that were loaded in few bits again, if they are; collective."""
        if self.rounding is None:
            return
        self.init(groups, state)
        loaded = {
            number: (state[param], self.rounding.read(number, state[param]))
            for _, param, number in self.numbered(groups)
            if not self.rounding.is_kept(state[param])
        }
        self.rounding.write(range(len(self.shards)), loaded, nearest=True)

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
        for place, (numbers, _) in enumerate(self.engines):
            self._step_with(place, {n: stepped[n] for n in numbers if n in stepped}, state)

    def _step_with(self, place: int, stepped: Mapping[int, Stepped], state: State) -> None:
        engine = self.engines[place][1]
        if engine.ranks.group is None and not stepped:
            return
        self._begin(place, stepped, state)

        def params(names: Iterable[str]) -> list[Tensor]:
            numbers = (self._numbers[name] for name in names)
            return [stepped[n].param for n in numbers if n in stepped]

        def load(wave: int, names: Sequence[str]) -> dict[str, Tensor]:
            numbers = [self._numbers[name] for name in names]
            mine = {n: stepped[n] for n in numbers if n in stepped}
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
            self._returned(place, updates)
            self._apply([stepped[n] for n in updates if n in stepped], updates)

        if self.host is None:
            engine.run(load, store)
        else:
            arriving = engine.redistribution.arriving
            self.host.run(engine.run, load, store, params, arriving, state)
        self._end(place)

    def _begin(self, place: int, stepped: Mapping[int, Stepped], state: State) -> None:
        """Begin a step of one engine."""

    def _inputs(
        self, place: int, wave: int, stepped: Mapping[int, Stepped], state: State
    ) -> Mapping[int, Tensor]:
        """Return what to orthogonalize of the parameters that a wave is the first to need."""
        place_of = self.engines[place][1].redistribution.place
        places = {n: place_of(self.shards[n].name) for n in stepped}
        return self._directions(self._arriving(place, wave), stepped, state, self._dtype, places)

    def _returned(self, place: int, updates: Mapping[int, Tensor]) -> None:
        """Act on updates that came back, in place."""

    def _end(self, place: int) -> None:
        """End a step of one engine."""

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
        """Update momenta and return what to orthogonalize.

        ``numbers`` are the shards that may be stepped on any rank; directions may be rounded to
        ``dtype`` and lie at ``places``.
        """
        if self.rounding is None:
            return self._mixed(stepped, state, dtype, places or {})
        exact = {n: self.rounding.read(n, state[item.param]) for n, item in stepped.items()}
        decoded = {item.param: {MOMENTUM: exact[n]} for n, item in stepped.items()}
        found = self._mixed(stepped, decoded, dtype, places or {})
        new = {n: (state[item.param], exact[n]) for n, item in stepped.items()}
        self.rounding.write(numbers, new)
        return found

    def _mixed(
        self,
        stepped: Mapping[int, Stepped],
        state: Mapping[Tensor, dict[str, Any]],
        dtype: torch.dtype | None,
        places: Mapping[int, Tensor | None],
    ) -> dict[int, Tensor]:
        """Mix gradients into momenta, group by group."""
        found: dict[int, Tensor] = {}
        for group, members in _by_group(stepped.values()):
            params = [item.param for item in members]
            grads = gradients(params, group, self.settings.weight_decay_method)
            momenta = [state[param][MOMENTUM] for param in params]
            mixed = directions(
                [grad.to(kept.dtype) for grad, kept in zip(grads, momenta, strict=True)],
                momenta,
                group["momentum"],
                self.settings.nesterov,
                dtype,
                [places.get(item.number) for item in members],
            )
            found.update(zip((item.number for item in members), mixed, strict=True))
        return found

    @property
    def _counts_steps(self) -> bool:
        """Whether each parameter's steps are counted."""
        return self.rounding is not None

    def _count(self, states: Iterable[dict[str, Any]]) -> None:
        if self._counts_steps:
            for values in states:
                values[STEP] += 1

    def _apply(self, stepped: Sequence[Stepped], updates: Mapping[int, Tensor]) -> None:
        if self._stats is not None:
            numbers = [item.number for item in stepped]
            self._stats.count_updates(numbers, [updates[number] for number in numbers])
        for group, members in _by_group(stepped):
            mine = [updates[item.number] for item in members]
            rate = decay_rate(group, self.settings.weight_decay_method)
            subtract(group, [item.param for item in members], mine, rate)

    def _update_of(self, place: int) -> UpdateT:
        scales = self.settings.orthogonalization.scales

        def update(
            stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
        ) -> None:
            self._orthogonalize(place, stack, matrices, reduce, shape, scales(shape))

        return update

    def _orthogonalize(
        self,
        place: int,
        stack: Tensor,
        matrices: Sequence[int],
        reduce: ReduceT | None,
        shape: tuple[int, int],
        scales: tuple[float, ...] = (),
    ) -> None:
        """Replace a stack of one engine's matrices by orthogonal factors times ``scales``."""
        compute = self.settings.orthogonalization
        if self._stats is None:
            compute.factors_(stack, reduce, shape, scales)
            return
        with self._stats.meter.span(ORTHOGONALIZATION):
            compute.factors_(stack, reduce, shape, scales)
        engine = self.engines[place][1]
        self._stats.look_at(engine, matrices, stack, reduce, shape, math.prod(scales))


def _by_group(stepped: Iterable[Stepped]) -> list[tuple[ParamGroup, list[Stepped]]]:
    groups: dict[int, tuple[ParamGroup, list[Stepped]]] = {}
    for item in stepped:
        groups.setdefault(id(item.group), (item.group, []))[1].append(item)
    return list(groups.values())


def decay_rate(group: ParamGroup, method: WeightDecayT) -> float:
    """Return by how much of themselves a step shrinks weights; 0 with ``l2``."""
    if method == "l2":
        return 0.0
    return float(group["weight_decay"] * (group["lr"] if method == "decoupled" else 1.0))


def shrink(params: Sequence[Tensor], rate: float) -> None:
    """Shrink weights by this part of themselves, in place."""
    if rate and params:
        # p - rate * p instead of (1 - rate) * p: rounds as emerging-optimizers does
        torch._foreach_add_(list(params), list(params), alpha=-rate)


def gradients(params: list[Tensor], group: ParamGroup, method: WeightDecayT) -> list[Tensor]:
    """Return the gradients to use: with ``l2`` new ones, which the weights are added to."""
    grads: list[Tensor] = [param.grad for param in params]  # type: ignore[misc]
    if method != "l2" or not group["weight_decay"] or not params:
        return grads
    return list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))


def directions(
    grads: list[Tensor],
    momenta: list[Tensor],
    momentum: float,
    nesterov: bool,
    dtype: torch.dtype | None = None,
    places: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """Update the momenta in place and return what to orthogonalize.

    Momentum is the moving average ``M <- momentum M + (1 - momentum) G``; Nesterov's direction
    mixes the gradient in once more, ``momentum M + (1 - momentum) G``. What is returned lies at its
    place of ``places``, flat tensors, where it fits. Else it is new, or without Nesterov the
    momentum itself, which the caller must not change. What is written is rounded to ``dtype``, if
    that is narrower than the gradient's.
    """
    if grads:
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
    found = []
    for grad, kept, place in zip(grads, momenta, places or [None] * len(grads), strict=True):
        narrower = dtype is not None and dtype.itemsize < grad.dtype.itemsize
        wanted = dtype if narrower else grad.dtype
        if place is not None and (place.dtype, place.numel()) == (wanted, grad.numel()):
            mixed = place.view(grad.shape)
        else:
            mixed = torch.empty_like(grad, dtype=wanted) if nesterov else kept
        if nesterov:
            torch.lerp(grad, kept, momentum, out=mixed)
        elif mixed is not kept:
            mixed.copy_(kept)
        found.append(mixed)
    return found


def subtract(
    group: ParamGroup, params: Sequence[Tensor], updates: Sequence[Tensor], rate: float = 0.0
) -> None:
    """Shrink weights by ``rate`` and subtract the learning rate times the updates, in place.

    Updates are rounded to the parameters' dtypes first.
    """
    shrink(params, rate)
    if params:
        # what is narrower is added as it is, in the same kernel
        added = [
            update if update.dtype.itemsize < param.dtype.itemsize else update.to(param.dtype)
            for param, update in zip(params, updates, strict=True)
        ]
        torch._foreach_add_(list(params), added, alpha=-group["lr"])
