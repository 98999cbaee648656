"""Muon on sharded parameters: matrices are whole only while they are orthogonalized.

Weight decay, momentum and the weight update are element-wise, so each rank applies them to its own
shards. Only directions are sent to other ranks, and updates are sent back.

Note [The way of a gradient]
    The chain clips gradients and steps its storages. In each, megatron-core's wrapper calls
    :meth:`ShardedOptimizer.step`, and that :meth:`MuonRule.step`. This runs the engine, and
    :class:`~megatron_eopt.layouts.Redistribution` calls back for each wave:

    1. ``load``: ``_inputs`` and ``_momentum_update`` mix gradients into momenta and write
       directions, by :func:`~megatron_eopt.math.passes.momentum_update_`. These are sent to the
       ranks that compute them.
    2. ``compute``: the engine calls ``_update`` with stacks of matrices, and ``_orthogonalize``
       calls :mod:`megatron_eopt.math.orthogonalize`.
    3. ``store``: updates are back. ``_apply`` and ``_write`` change weights by
       :func:`~megatron_eopt.math.passes.update_`, and the model's copies with them.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_eopt.base.gpu import SideStream
from megatron_eopt.base.names import MOMENTUM, MOMENTUM_SCALE, STEP
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.passes import MomentumMixing, empty_sums, momentum_update_, update_
from megatron_eopt.optimizers.engine import EngineConfig, MatrixEngine
from megatron_eopt.optimizers.modes import Schedule
from megatron_eopt.optimizers.momentum import RoundedMomentum
from megatron_eopt.optimizers.step_stats import ORTHOGONALIZATION, StepStats
from megatron_eopt.optimizers.stored_matrices import MatrixSums, StoredMatrices
from megatron_eopt.optimizers.update_rule import ParamGroup, State, UpdateRule
from megatron_eopt.storage.interface import model_copy_of
from megatron_eopt.storage.shard import ParamShard

WeightDecayT = Literal["decoupled", "l2", "independent"]
"""How weight decay acts: ``decoupled`` shrinks weights by ``lr * weight_decay`` (AdamW,
arXiv:1711.05101), ``independent`` by ``weight_decay`` at any learning rate, and ``l2`` adds
``weight_decay * weight`` to the gradient."""

WEIGHT_DECAY_METHODS: tuple[WeightDecayT, ...] = get_args(WeightDecayT)


@dataclass
class Stepped:
    """A parameter that has a gradient in this step."""

    number: int  # index of its shard
    group: ParamGroup
    param: Tensor
    state: dict[str, Any]


class MuonRule(UpdateRule):
    """Muon as an update rule; see Note [The way of a gradient].

    What is sent when: Note [Phases of a step] of engine.py. How long tensors are valid: Note
    [Lifetimes] of update_rule.py.

    One group of ranks stores all shards. ``optimizer`` is a TensorParallelMuon, whose settings are
    read at each use. Matrices are computed in ``engine_config.dtype``.
    """

    reports_updates = True
    fuses_grad_scale = True
    # whether the `_update` and `_orthogonalize` of this class take slabs of a matrix that several
    # ranks share, by `reduce`; a class that overrides one of them and does not say so gets whole
    # matrices
    takes_slabs = True
    # how many sums :meth:`partial_sums` returns; if any, weights change after all waves
    sums_per_matrix = 0

    def __init__(
        self, optimizer: Any, shards: Sequence[ParamShard], engine_config: EngineConfig
    ) -> None:
        super().__init__(type(optimizer).__name__, shards)
        if self._needs_whole_matrices():
            engine_config = replace(engine_config, whole_only=True)
        self.optimizer = optimizer
        self._dtype = engine_config.dtype
        self._scales_of = functools.cache(optimizer.orthogonalization.scales)
        self._numbers = {shard.name: number for number, shard in enumerate(shards)}
        self.engines = self._engines(engine_config)
        self.engine = self.engines[0]
        self.redistribution = self.engine.redistribution
        self.rounding: RoundedMomentum | None = None  # stores momentum in fewer bits
        if optimizer.momentum_dtype != "fp32":
            self.rounding = RoundedMomentum(optimizer.momentum_dtype, shards, engine_config.device)
            self.optional_state = frozenset({MOMENTUM_SCALE, STEP})
        # writes updates that were computed before the step over those of the waves; see
        # `step_checks.py`
        self.insert_checked: Callable[[Mapping[int, Tensor]], None] | None = None
        self._stats: StepStats | None = None
        self._totals: MatrixSums | None = None
        if self.sums_per_matrix:
            self._totals = MatrixSums(shards, self.engine.device, self.engine.sharing)
        self._side = SideStream()  # for the directions of the next wave
        self._squares: dict[str, Tensor] = {}  # sums of squares of matrices that are in place

    @classmethod
    def _needs_whole_matrices(cls) -> bool:
        """Whether a class computes updates in its own way, and does not say that it takes slabs."""
        homes = (
            next(home for home in cls.__mro__ if name in vars(home))
            for name in (MuonRule._update.__name__, MuonRule._orthogonalize.__name__)
        )
        # what a base class says holds for the method of the base class only
        return not all(vars(home).get("takes_slabs", False) for home in homes)

    @functools.cached_property
    def shapes(self) -> list[list[tuple[int, int]]]:
        """Shapes of each parameter's matrices, or of this rank's pieces in blockwise mode."""
        return [
            [layout.compact().local_shape(shard.ranks.rank) or (0, 0) for layout in shard.layouts]
            if self.engine.blockwise
            else [matrix.shape for matrix in shard.split.matrices]
            for shard in self.shards
        ]

    def stored_matrices(self, number: int) -> StoredMatrices:
        """Return the matrices in the tensor of a shard, for :meth:`partial_sums`."""
        assert self._totals is not None, "sums_per_matrix is 0"
        return self._totals.stored[number]

    @property
    def schedules(self) -> list[Schedule]:
        """Which rank computes which matrices, and what is sent."""
        return [engine.schedule for engine in self.engines]

    def _engines(self, engine_config: EngineConfig) -> list[MatrixEngine]:
        """Return the engines that compute the shards' matrices."""
        return [MatrixEngine(self.shards, self._update, engine_config)]

    def buffers(self) -> Iterator[Tensor]:
        """Yield communication buffers and index tensors, which live between steps."""
        yield from super().buffers()
        if self.rounding is not None:
            yield from self.rounding.tensors()
        if self._totals is not None:
            yield from self._totals.tensors

    def measure(self, stats: StepStats | None) -> None:
        """Measure the following steps with ``stats``; None stops measuring."""
        super().measure(stats)
        self._stats = stats

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Create every momentum and, where steps are counted, step counters."""
        for _, param, number in self.numbered(groups):
            if MOMENTUM not in state[param] and self.rounding is not None:
                self.rounding.make(number, state[param], param)
            elif MOMENTUM not in state[param]:
                state[param][MOMENTUM] = torch.zeros_like(param, requires_grad=False)
            if self._counts_steps:
                zero = torch.zeros((), dtype=torch.float32, device=self._device_of_counts)
                state[param][STEP] = state[param].setdefault(STEP, zero).to(zero.device)

    @property
    def _device_of_counts(self) -> torch.device:
        # update rules that read them on the host keep them there, to avoid a synchronization
        return self.engine.device if self.fuses_grad_scale else torch.device("cpu")

    @property
    def _counts_steps(self) -> bool:
        """Whether each parameter's steps are counted."""
        return self.rounding is not None

    def allocate_for_load(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Create all state that is about to be loaded, in the form that checkpoints have."""
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
        """Round loaded momenta to the stored format, if there is one; collective."""
        if self.rounding is None:
            return
        self.init(groups, state)
        loaded = {
            number: (state[param], self.rounding.read(number, state[param]))
            for _, param, number in self.numbered(groups)
            if not self.rounding.is_kept(state[param])
        }
        self.rounding.write(range(len(self.shards)), loaded, nearest=True)

    def is_sharded_like_param(self, kind: str, value: Any) -> bool:
        """Whether a state value has one element per element of the parameter."""
        return kind != MOMENTUM_SCALE and super().is_sharded_like_param(kind, value)

    @torch.no_grad()
    def step(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Update the parameters of ``groups``; collective."""
        stepped = self._stepped(groups, state)
        # in a group, a rank without gradients still takes part in the all-to-alls
        if self.engine.ranks.group is None and not stepped:
            return
        if self._counts_steps and stepped:
            counts = [item.state[STEP] for item in stepped.values()]
            one = torch.ones_like(counts[0])
            if self.grad_scale is not None:
                # whether the step is skipped may be known on the device only
                one = (~self.grad_scale.isnan()).to(one)
            torch._foreach_add_(counts, [one] * len(counts))
        self._begin(groups, stepped)
        self._run(stepped, state)
        self._end(stepped)

    def _stepped(self, groups: Sequence[ParamGroup], state: State) -> dict[int, Stepped]:
        stepped = {}
        for group, param, number in self.numbered(groups):
            if MOMENTUM not in state[param]:
                # as torch's optimizers do, since a user may have cleared the state
                self.init(groups, state)
            if param.grad is not None:
                stepped[number] = Stepped(number, group, param, state[param])
        return stepped

    def look_ahead(
        self, numbers: Sequence[int], groups: Sequence[ParamGroup], state: State
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return the directions of some shards, as they are sent, and what momenta will be."""
        stepped = {n: item for n, item in self._stepped(groups, state).items() if n in numbers}
        params = [item.param for item in stepped.values()]
        if self.host is not None:
            self.host.fetch(params, state)
        momenta = {
            n: item.state[MOMENTUM].clone()
            if self.rounding is None
            else self.rounding.read(n, item.state).clone()
            for n, item in stepped.items()
        }
        # into copies: the step itself will do the same to the state
        found = self._momentum_update(stepped, momenta, self.optimizer.nesterov, self._dtype)
        if self.host is not None:
            self.host.write_back(params, state)
            self.host.wait_for_write_back()
        return {n: self._input(n, found).to(self._dtype) for n in numbers}, momenta

    def compute_alone(self, engine: MatrixEngine, stack: Tensor, matrices: Sequence[int]) -> None:
        """Compute whole matrices of an engine on this rank, without measuring them."""
        # `_update` reads the current engine; a matrix that is computed again must not count twice
        self.engine, before = engine, self._stats
        self._stats = None
        engine.compute_alone(stack, matrices)
        self._stats = before

    @property
    def is_measured(self) -> bool:
        """Whether statistics are collected in this step."""
        return self._stats is not None

    def _run(self, stepped: Mapping[int, Stepped], state: State) -> None:
        """Update the parameters whose matrices the current engine computes."""

        def params(names: Iterable[str]) -> list[Tensor]:
            numbers = (self._numbers[name] for name in names)
            return [stepped[n].param for n in numbers if n in stepped]

        def load(wave: int, names: Sequence[str]) -> dict[str, Tensor]:
            numbers = [self._numbers[name] for name in names]
            # also without any parameter, because a hook may call collectives
            inputs = self._inputs(wave, {n: stepped[n] for n in numbers if n in stepped})
            return {name: self._input(n, inputs) for name, n in zip(names, numbers, strict=True)}

        # updates that wait for the sums over whole matrices, and this rank's parts of these sums
        waiting: dict[int, Tensor] = {}
        mine: dict[int, Sequence[Tensor]] = {}

        def store(results: Mapping[str, Tensor]) -> None:
            updates = {self._numbers[name]: update for name, update in results.items()}
            # others took part with zeros, because the plan is fixed; they must not change
            updates = {n: update for n, update in updates.items() if n in stepped}
            if self.insert_checked is not None:
                self.insert_checked(updates)
            if self._totals is None:
                self._apply([stepped[n] for n in updates], updates)
                return
            waiting.update(updates)
            mine.update({n: self.partial_sums(stepped[n], updates[n]) for n in updates})

        # off-loaded tensors have streams of their own
        side = self._side if self.host is None else None
        moving = (
            nullcontext((load, store))
            if self.host is None
            else self.host.moving(load, store, params, self.engine.redistribution.arriving, state)
        )
        with moving as (load_moved, store_moved):
            self.engine.redistribution.run(load_moved, self.engine.compute, store_moved, side)
        self._squares.clear()  # left of matrices that the engine skipped
        if self._totals is not None:
            # of all shards, because the all-reduce must have the same size on all ranks
            totals = self._totals.totals(range(len(self.shards)), mine, self.sums_per_matrix)
            items = {stepped[n].param: stepped[n] for n in waiting}
            self._apply_with_totals(items, waiting, totals, state)

    def _apply_with_totals(
        self,
        items: Mapping[Tensor, Stepped],
        updates: Mapping[int, Tensor],
        totals: Mapping[int, Tensor],
        state: State,
    ) -> None:
        """Change weights once the sums over whole matrices are known."""

        def apply(params: Sequence[Tensor]) -> None:
            its = [items[param] for param in params]
            for item in its:
                self.use_totals(item, updates[item.number], totals[item.number])
            self._apply(its, updates)

        if self.host is None:
            apply(list(items))
        else:
            # the waves have moved weights and state back to the host
            self.host.step_in_chunks(items, apply, state)

    def _input(self, number: int, inputs: Mapping[int, Tensor]) -> Tensor:
        if number in inputs:
            return inputs[number].contiguous()
        # for a planned parameter without a gradient
        shape, device = self.shards[number].shape, self.engine.device
        # of any dtype, because packing converts
        return torch.zeros(shape, dtype=torch.float32, device=device)

    def _begin(self, groups: Sequence[ParamGroup], stepped: Mapping[int, Stepped]) -> None:
        """Prepare a step; a hook for subclasses."""

    def _end(self, stepped: Mapping[int, Stepped]) -> None:
        """Finish a step; a hook for subclasses."""

    def partial_sums(self, item: Stepped, update: Tensor) -> Sequence[Tensor]:
        """Return sums over what this rank stores of each matrix; a hook for subclasses.

        It may change the update in place.

        Returns:
            As many as :attr:`sums_per_matrix`, each float64 ``(matrices,)``, as
            ``stored_matrices(item.number).sums`` returns them.
        """
        raise NotImplementedError

    def use_totals(self, item: Stepped, update: Tensor, totals: Tensor) -> None:
        """Change an update in place, before weight decay and learning rate; a hook for subclasses.

        ``totals`` has the sums of :meth:`partial_sums` over all ranks, float64
        ``(sums_per_matrix, matrices)``.
        """
        raise NotImplementedError

    def _inputs(self, wave: int, stepped: Mapping[int, Stepped]) -> Mapping[int, Tensor]:
        """Return the directions of the parameters that a wave is the first to need."""
        places: dict[int, Tensor | None] = dict.fromkeys(stepped)
        if self._totals is None:
            # updates that are held until all waves have run must not be in a wave's memory
            place_of = self.engine.redistribution.place
            places = {n: place_of(self.shards[n].name) for n in stepped}
        return self._directions(wave, stepped, self._dtype, places)

    def _directions(
        self,
        wave: int,
        stepped: Mapping[int, Stepped],
        dtype: torch.dtype | None = None,
        places: Mapping[int, Tensor | None] | None = None,
    ) -> dict[int, Tensor]:
        """Update momenta; return directions, possibly rounded to ``dtype`` and at ``places``."""
        if self.rounding is None:
            momenta = {n: item.state[MOMENTUM] for n, item in stepped.items()}
        else:
            momenta = {n: self.rounding.read(n, item.state) for n, item in stepped.items()}
        found = self._momentum_update(stepped, momenta, self.optimizer.nesterov, dtype, places)
        if self.rounding is not None:
            new = {n: (item.state, momenta[n]) for n, item in stepped.items()}
            self.rounding.write(self.engine.arrivals[wave], new)
        return found

    def _momentum_update(
        self,
        stepped: Mapping[int, Stepped],
        momenta: Mapping[int, Tensor],
        nesterov: bool,
        dtype: torch.dtype | None = None,
        places: Mapping[int, Tensor | None] | None = None,
    ) -> dict[int, Tensor]:
        """Mix gradients into ``momenta``, and return directions."""
        found: dict[int, Tensor] = {}
        for group, members in _by_group(stepped.values()):
            mine = [momenta[item.number] for item in members]
            outs = [
                _out(kept, None if places is None else places[item.number], dtype, nesterov)
                for kept, item in zip(mine, members, strict=True)
            ]
            grads: list[Any] = [item.param.grad for item in members]
            sums = [
                None if places is None else self._empty_sums(item.number, out, places[item.number])
                for item, out in zip(members, outs, strict=True)
            ]
            weights = [item.param for item in members]
            # settings are read from the group in each step, so that they can be changed meanwhile
            how = self._mixing(group, nesterov)
            # gradients are not clipped yet: the pass multiplies them by their scale
            momentum_update_(mine, outs, grads, weights, self.grad_scale, how, sums)
            for item, kept, out in zip(members, mine, outs, strict=True):
                found[item.number] = kept if out is None else out.view(kept.shape)
        return found

    def _empty_sums(self, number: int, out: Tensor | None, place: Tensor | None) -> Tensor | None:
        """Return the tensor for the sums of squares of a matrix that is written to its place."""
        # A tensor in a place is computed where it is, so its sum is that of its matrix, or of this
        # rank's slab, which `normalize` adds over ranks. With several matrices, it is the sum of
        # none.
        names = self.shards[number].matrix_names
        if out is None or out is not place or len(names) > 1:
            return None
        sums = empty_sums(out)
        if sums is not None:
            self._squares[names[0]] = sums
        return sums

    def _squares_of(self, matrices: Sequence[int]) -> Tensor | None:
        """Return known sums of squares ``(batch, parts)``, which are then forgotten."""
        found = [self._squares.pop(self.engine.names[matrix], None) for matrix in matrices]
        known = [sums for sums in found if sums is not None]
        # a stack is divided in one pass, so all norms must be known
        if len(known) < len(found):
            return None
        return known[0].unsqueeze(0) if len(known) == 1 else torch.stack(known)

    def _apply(self, stepped: Sequence[Stepped], updates: Mapping[int, Tensor]) -> None:
        """Apply weight decay, and subtract the updates."""
        if self._stats is not None:
            numbers = [item.number for item in stepped]
            self._stats.count_updates(numbers, [updates[number] for number in numbers])
        self._write(stepped, updates)

    def _write(self, stepped: Sequence[Stepped], updates: Mapping[int, Tensor]) -> None:
        for group, members in _by_group(stepped):
            params = [item.param for item in members]
            update_(
                params,
                # taken from the tensors, so that nobody copies them again after the step
                [model_copy_of(param) for param in params],
                [updates[item.number] for item in members],
                self.grad_scale,
                *self._rates(group),
                cautious=self.optimizer.cautious_weight_decay,
            )

    def _rates(self, group: Mapping[str, Any]) -> tuple[float, float]:
        """Return the rate of updates, and the share of weights that decays."""
        of_decay = {"decoupled": group["lr"], "independent": 1.0, "l2": 0.0}
        decay = group["weight_decay"] * of_decay[self.optimizer.weight_decay_method]
        return group["lr"], decay

    def _mixing(self, group: Mapping[str, Any], nesterov: bool) -> MomentumMixing:
        is_l2 = self.optimizer.weight_decay_method == "l2"
        decay = group["weight_decay"] if is_l2 else 0.0
        return MomentumMixing(group["momentum"], nesterov, decay)

    def _update(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Replace a stack of directions by updates, in place; a hook for subclasses.

        Args:
            stack: ``(batch, rows, cols)``; rows are inputs if ``engine.transposed`` says so.
            matrices: The index of each matrix.
            reduce: Adds up sums over a matrix's slabs; None if matrices are whole, as they are
                unless the class that has this method sets :attr:`takes_slabs`.
            shape: Of a whole matrix.
        """
        # of the whole matrix, also if this rank has a slab of it
        scales = self._scales_of(self.engine.out_in(matrices[0], shape))
        self._orthogonalize(stack, matrices, reduce, shape, scales)

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
        squares = self._squares_of(matrices)
        if self._stats is None:
            compute.factors_(stack, reduce, shape, scales, squares)
            return
        with self._stats.meter.span(ORTHOGONALIZATION):
            compute.factors_(stack, reduce, shape, scales, squares)
        self._stats.look_at(self.engine, matrices, stack, reduce, shape, math.prod(scales))


def _by_group(stepped: Iterable[Stepped]) -> list[tuple[ParamGroup, list[Stepped]]]:
    groups: dict[int, tuple[ParamGroup, list[Stepped]]] = {}
    for item in stepped:
        groups.setdefault(id(item.group), (item.group, []))[1].append(item)
    return list(groups.values())


def _out(
    kept: Tensor, place: Tensor | None, dtype: torch.dtype | None, nesterov: bool
) -> Tensor | None:
    """Return the tensor to write a direction to: its place in a stack, if dtype and size fit.

    The direction is rounded to ``dtype`` if that is narrower than the momentum's. None means that
    the momentum itself is the direction (without Nesterov, a place and rounding).
    """
    narrower = dtype is not None and dtype.itemsize < kept.dtype.itemsize
    wanted = dtype if narrower else kept.dtype
    if place is not None and (place.dtype, place.numel()) == (wanted, kept.numel()):
        return place
    return torch.empty_like(kept, dtype=wanted) if nesterov or narrower else None
