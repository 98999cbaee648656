"""Muon over any storage: momentum where the weights are, matrices whole while they are computed.

Weight decay, momentum and the update itself are element by element and do not care how a matrix is
stored, so they act on what a rank stores. Only directions travel, and come back as updates.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_eopt.base.names import MOMENTUM, MOMENTUM_SCALE, STEP
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.driver import Driver, ParamGroup, State
from megatron_eopt.optimizers.engine import MatrixEngine, Means
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.optimizers.momentum import RoundedMomentum
from megatron_eopt.optimizers.step_stats import ORTHOGONALIZATION, StepStats
from megatron_eopt.storage.shard import Shard

WeightDecayT = Literal["decoupled", "l2", "independent"]
"""How weight decay acts: ``decoupled`` shrinks weights by ``lr * weight_decay`` (AdamW,
arXiv:1711.05101), ``independent`` by ``weight_decay`` whatever the learning rate, ``l2`` adds
``weight_decay * weight`` to the gradient."""

WEIGHT_DECAY_METHODS: tuple[WeightDecayT, ...] = get_args(WeightDecayT)


@dataclass
class Stepped:
    """A parameter that has a gradient in this step."""

    number: int  # of its shard
    group: ParamGroup
    param: Tensor
    state: dict[str, Any]


class MuonDriver(Driver):
    """Steps Muon; see Note [Phases of a step].

    One group of ranks stores all shards. ``optimizer`` is a TensorParallelMuon, whose settings are
    read when they are needed. The dtype of ``means`` is the arithmetic's.
    """

    tells_updates = True

    def __init__(self, optimizer: Any, shards: Sequence[Shard], means: Means) -> None:
        super().__init__(type(optimizer).__name__, shards)
        self.optimizer = optimizer
        self._dtype = means.dtype
        self._scales_of = functools.cache(optimizer.orthogonalization.scales)
        self._numbers = {shard.name: number for number, shard in enumerate(shards)}
        self.engines = self._engines(means)
        self.engine = self.engines[0]
        self.redistribution = self.engine.redistribution
        # what keeps momentum in fewer bits between steps
        self.rounding: RoundedMomentum | None = None
        if optimizer.momentum_dtype != "fp32":
            self.rounding = RoundedMomentum(optimizer.momentum_dtype, shards, means.device)
            self.dispensable = frozenset({MOMENTUM_SCALE, STEP})
        self._stats: StepStats | None = None

    @property
    def schedules(self) -> list[Schedule]:
        """Who computes which matrices, and what travels."""
        return [engine.schedule for engine in self.engines]

    def _engines(self, means: Means) -> list[MatrixEngine]:
        """Return what computes the shards' matrices."""
        return [MatrixEngine(self.shards, self._update, means)]

    def buffers(self) -> Iterator[Tensor]:
        """Yield what lives on between steps: what matrices travel through, and where rows are."""
        yield from super().buffers()
        if self.rounding is not None:
            yield from self.rounding.tensors()

    def measure(self, stats: StepStats | None) -> None:
        """Let steps be measured from now on, or no longer."""
        super().measure(stats)
        self._stats = stats

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Make every momentum exist, and where steps count a counter."""
        for _, param, number in self.numbered(groups):
            if MOMENTUM not in state[param] and self.rounding is not None:
                self.rounding.make(number, state[param], param)
            elif MOMENTUM not in state[param]:
                state[param][MOMENTUM] = torch.zeros_like(param, requires_grad=False)
            if self._counts_steps:
                # on the host, so that reading it makes nobody wait
                state[param].setdefault(STEP, torch.zeros((), dtype=torch.float32))

    @property
    def _counts_steps(self) -> bool:
        """Whether each parameter's steps are counted."""
        return self.rounding is not None

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
        """Update the parameters of ``groups``; all ranks of the group call this together."""
        stepped = self._stepped(groups, state)
        if self.engine.ranks.group is None and not stepped:
            return
        if self._counts_steps:
            for item in stepped.values():
                item.state[STEP] += 1
        self._begin(groups, stepped)
        self._run(stepped, state)
        self._end(stepped)

    def _stepped(self, groups: Sequence[ParamGroup], state: State) -> dict[int, Stepped]:
        return {
            number: Stepped(number, group, param, state[param])
            for group, param, number in self.numbered(groups)
            if param.grad is not None
        }

    def _run(self, stepped: Mapping[int, Stepped], state: State) -> None:
        """Step parameters of which the present engine computes the matrices."""

        def params(names: Iterable[str]) -> list[Tensor]:
            numbers = (self._numbers[name] for name in names)
            return [stepped[n].param for n in numbers if n in stepped]

        def load(wave: int, names: Sequence[str]) -> dict[str, Tensor]:
            numbers = [self._numbers[name] for name in names]
            inputs = self._inputs(wave, {n: stepped[n] for n in numbers if n in stepped})
            return {name: self._input(n, inputs) for name, n in zip(names, numbers, strict=True)}

        def store(results: Mapping[str, Tensor]) -> None:
            updates = {self._numbers[name]: update for name, update in results.items()}
            self._apply([stepped[n] for n in updates if n in stepped], updates)

        self._run_waves(self.engine.run, load, store, params, state)

    def _input(self, number: int, inputs: Mapping[int, Tensor]) -> Tensor:
        if number in inputs:
            return inputs[number].contiguous()
        # in place of one that rests, but is in the plan
        shape, device = self.shards[number].shape, self.engine.device
        return torch.zeros(shape, dtype=torch.float32, device=device)

    def _begin(self, groups: Sequence[ParamGroup], stepped: Mapping[int, Stepped]) -> None:
        """Begin a step."""

    def _end(self, stepped: Mapping[int, Stepped]) -> None:
        """End a step."""

    def _inputs(self, wave: int, stepped: Mapping[int, Stepped]) -> Mapping[int, Tensor]:
        """Return what to orthogonalize of the parameters that a wave is the first to need."""
        place_of = self.engine.redistribution.place
        places = {n: place_of(self.shards[n].name) for n in stepped}
        return self._directions(wave, stepped, self._dtype, places)

    def _directions(
        self,
        wave: int,
        stepped: Mapping[int, Stepped],
        dtype: torch.dtype | None = None,
        places: Mapping[int, Tensor | None] | None = None,
        momenta: Mapping[int, Tensor] | None = None,
    ) -> dict[int, Tensor]:
        """Update momenta, or others given in their place, and return what to orthogonalize.

        Directions may be rounded to ``dtype`` and lie at ``places``.
        """
        if momenta is not None:
            pass
        elif self.rounding is None:
            momenta = {n: item.state[MOMENTUM] for n, item in stepped.items()}
        else:
            momenta = {n: self.rounding.read(n, item.state) for n, item in stepped.items()}
        found: dict[int, Tensor] = {}
        for group, members in _by_group(stepped.values()):
            numbers = [item.number for item in members]
            params = [item.param for item in members]
            grads: Any = [param.grad for param in params]
            if self.optimizer.weight_decay_method == "l2" and group["weight_decay"]:
                grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
            mine = [momenta[n] for n in numbers]
            mixed = directions(
                [grad.to(kept.dtype) for grad, kept in zip(grads, mine, strict=True)],
                mine,
                group["momentum"],
                self.optimizer.nesterov,
                dtype,
                [None if places is None else places[n] for n in numbers],
            )
            found.update(zip(numbers, mixed, strict=True))
        if self.rounding is not None:
            new = {n: (item.state, momenta[n]) for n, item in stepped.items()}
            self.rounding.write(self.engine.arrivals[wave], new)
        return found

    def _apply(self, stepped: Sequence[Stepped], updates: Mapping[int, Tensor]) -> None:
        """Shrink weights, and subtract updates that came back."""
        if self._stats is not None:
            numbers = [item.number for item in stepped]
            self._stats.count_updates(numbers, [updates[number] for number in numbers])
        for group, members in _by_group(stepped):
            params = [item.param for item in members]
            method = self.optimizer.weight_decay_method
            rate = group["weight_decay"] * (group["lr"] if method == "decoupled" else 1.0)
            if rate and method != "l2":
                # p - rate * p instead of (1 - rate) * p: rounds as emerging-optimizers does
                torch._foreach_add_(params, params, alpha=-rate)
            # what is narrower than its weight is added as it is, in the same kernel
            narrow = [
                update if update.dtype.itemsize < param.dtype.itemsize else update.to(param.dtype)
                for param, update in zip(params, (updates[m.number] for m in members), strict=True)
            ]
            torch._foreach_add_(params, narrow, alpha=-group["lr"])

    def _update(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Replace a stack of directions by updates, in place."""
        self._orthogonalize(stack, matrices, reduce, shape, self._scales_of(shape))

    def _orthogonalize(
        self,
        stack: Tensor,
        matrices: Sequence[int],
        reduce: ReduceT | None,
        shape: tuple[int, int],
        scales: tuple[float, ...] = (),
    ) -> None:
        """Replace a stack of matrices by orthogonal factors times ``scales``."""
        compute = self.optimizer.orthogonalization
        if self._stats is None:
            compute.factors_(stack, reduce, shape, scales)
            return
        with self._stats.meter.span(ORTHOGONALIZATION):
            compute.factors_(stack, reduce, shape, scales)
        self._stats.look_at(self.engine, matrices, stack, reduce, shape, math.prod(scales))


def _by_group(stepped: Iterable[Stepped]) -> list[tuple[ParamGroup, list[Stepped]]]:
    groups: dict[int, tuple[ParamGroup, list[Stepped]]] = {}
    for item in stepped:
        groups.setdefault(id(item.group), (item.group, []))[1].append(item)
    return list(groups.values())


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
