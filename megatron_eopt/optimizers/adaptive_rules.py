"""How adaptive Muon normalizes orthogonal factors: one rule for each kind of second moment.

Note [Where statistics live]
    AdaMuon's are element by element: they are cut like the weights and act on updates that came
    back. NorMuon's and NAMO's are a few numbers for each matrix, and every rank that stores a part
    of a parameter has all of its. A step tells them to all ranks of the group, which may compute on
    any matrix, and NorMuon's new ones to those that store it: one all-reduce each, of maxima, since
    no statistic is negative and a rank has zeros for what it does not know. NAMO's norms are summed
    over what the ranks store, in one all-reduce for the matrices of a wave.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.names import MOMENT2, STEP
from megatron_eopt.layouts import Layout
from megatron_eopt.layouts.boxes import Int64Array
from megatron_eopt.math.moments import (
    Moment2MethodT,
    adamuon_,
    correction,
    namo_,
    normuon_,
    statistic_shape,
)
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.orthogonalize import Orthogonalization
from megatron_eopt.optimizers.driver import ParamGroup
from megatron_eopt.optimizers.engine import MatrixEngine
from megatron_eopt.optimizers.matrix_runs import MatrixRuns
from megatron_eopt.stores.shard import Shard


class Rule:
    """What the rules have in common: one instance per engine.

    Parameters are numbered as the engine's shards are. What is computed for those that rest is
    thrown away.
    """

    method: Moment2MethodT

    def __init__(
        self,
        engine: MatrixEngine,
        shards: Sequence[Shard],
        arithmetic: Orthogonalization,
        bias_correction: bool,
    ) -> None:
        self.engine = engine
        self.shards = shards
        self.arithmetic = arithmetic
        self._bias_correction = bias_correction
        # of each parameter's matrices; blockwise of this rank's pieces
        self.shapes = [
            [layout.compact().local_shape(shard.ranks.rank) or (0, 0) for layout in shard.layouts]
            if engine.blockwise
            else [matrix.shape for matrix in shard.split.matrices]
            for shard in shards
        ]
        self.statistics = [
            [statistic_shape(self.method, *shape) for shape in shapes] for shapes in self.shapes
        ]
        self._groups: Sequence[ParamGroup] = ()
        self._states: Mapping[int, Mapping[str, Any]] = {}

    def begin(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[ParamGroup]) -> None:
        """Prepare a step with the states of parameters that are stepped here, and all groups."""
        self._states, self._groups = states, groups

    def on_wave(self, wave: int, moving: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Look at gradients and directions of the parameters that a wave is the first to need."""

    def on_orthogonal(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Act on the orthogonal factors of whole matrices, or slabs of them, in place."""

    def finish(self, updates: Mapping[int, Tensor]) -> None:
        """Act on stored updates, in place."""

    def end(self) -> None:
        """Write the statistics of a step to the states that it began with."""

    def views_of(self, place: int, moment: Tensor) -> list[Tensor]:
        """Return the statistics of a parameter's matrices, which lie one after another."""
        parts = torch.split(moment.view(-1), [math.prod(s) for s in self.statistics[place]])
        return [part.view(shape) for part, shape in zip(parts, self.statistics[place], strict=True)]

    def buffers(self) -> Iterator[Tensor]:
        """Yield what lives on between steps apart from state."""
        return iter(())


class AdaMuonRule(Rule):
    """Entries by their own second moments, on stored updates."""

    method: Moment2MethodT = "adamuon"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._scales = [
            [self.arithmetic.scale(shape) if shape[0] else 0.0 for shape in shapes]
            for shapes in self.shapes
        ]
        self._segments = {
            place: MatrixRuns.of(self.shards[place], self.engine.device)
            for place, scales in enumerate(self._scales)
            if len(set(scales)) > 1
        }
        self._factors = {i: s.per_run(self._scales[i]) for i, s in self._segments.items()}

    def buffers(self) -> Iterator[Tensor]:
        """Yield where scales change, and the scales there."""
        for place, segments in self._segments.items():
            yield from (*segments.tensors, self._factors[place])

    def finish(self, updates: Mapping[int, Tensor]) -> None:
        """Divide by the roots of the second moments, then scale each matrix by its shape."""
        places = [place for place in sorted(updates) if place in self._states]
        for first, last, (beta2, eps) in _runs([_settings(self._groups[i]) for i in places]):
            run = places[first:last]
            # they may have come to the device for this wave alone
            moments: list[Tensor] = [self._states[place][MOMENT2] for place in run]
            mine = [updates[place] for place in run]
            # in fp16 eps is 0, and so are the squares of small updates
            wide = [u.float() if u.dtype.itemsize == 2 else u for u in mine]
            exact = [m.to(u.dtype) for m, u in zip(moments, wide, strict=True)]
            adamuon_(wide, exact, beta2, eps, [self._divisor(place, beta2) for place in run])
            for kept, computed in ((mine, wide), (moments, exact)):
                if any(k is not c for k, c in zip(kept, computed, strict=True)):
                    torch._foreach_copy_(kept, computed)
        uniform = [place for place in places if place not in self._segments]
        if uniform:
            factors = [self._scales[place][0] for place in uniform]
            torch._foreach_mul_([updates[place] for place in uniform], factors)
        for place in places:
            if place in self._segments:
                self._segments[place].multiply_(updates[place], self._factors[place])

    def _divisor(self, place: int, beta2: float) -> float:
        steps = float(self._states[place][STEP]) if self._bias_correction else 1.0
        return correction(beta2, steps, self._bias_correction)


class MatrixRule(Rule):
    """What NorMuon and NAMO have in common: in a step every rank has all statistics, flat."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shard_of = [n for n, shapes in enumerate(self.shapes) for _ in shapes]
        self._sizes = [sum(map(math.prod, shapes)) for shapes in self.statistics]
        self._apart = self.engine.ranks.group is None or self.engine.blockwise
        self._flat = torch.empty(0)
        self._divisors: Tensor | None = None

    def begin(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[ParamGroup]) -> None:
        """Let all ranks have the statistics, and what they are divided by."""
        super().begin(states, groups)
        steps = torch.zeros(len(self.shards))
        if self._bias_correction:
            for place, values in states.items():
                steps[place] = values[STEP]
        device = self.engine.device
        everything = torch.cat([torch.zeros(sum(self._sizes), device=device), steps.to(device)])
        self._flat, steps = torch.split(everything, [sum(self._sizes), len(self.shards)])
        self._copy(self._flat, into_states=False)
        self._agree(everything)
        if self._bias_correction:
            beta2 = torch.tensor([group["beta2"] for group in groups], dtype=torch.float64)
            # what is divided by no step's divisor rests
            self._divisors = 1 - beta2.to(device) ** steps.double().clamp(min=1)

    def end(self) -> None:
        """Write the statistics to the states."""
        self._copy(self._flat, into_states=True)

    def _copy(self, flat: Tensor, *, into_states: bool) -> None:
        if not self._states:
            return
        parts = torch.split(flat, self._sizes)
        kept = [values[MOMENT2] for values in self._states.values()]
        mine = [parts[p].view_as(k) for p, k in zip(self._states, kept, strict=True)]
        if into_states:
            # inf would stay, and make nan of the next mean
            torch._foreach_clamp_max_(mine, [torch.finfo(k.dtype).max for k in kept])
        pair = (kept, mine) if into_states else (mine, kept)
        torch._foreach_copy_(*pair)

    def _agree(self, values: Tensor) -> None:
        if not self._apart:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.engine.ranks.group)

    def _divisors_of(self, places: Sequence[int]) -> Tensor | float:
        """Return what the statistics of some parameters are divided by, float64 ``(n,)``, or 1."""
        return 1.0 if self._divisors is None else self._divisors[list(places)]


class NorMuonRule(MatrixRule):
    """Rows or columns by their mean squares, where each matrix is computed."""

    method: Moment2MethodT = "normuon"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        shapes = [shape for some in self.statistics for shape in some]
        first = np.cumsum([0, *map(math.prod, shapes)])
        rank, works = self.engine.ranks.rank, self.engine.work.matrices
        # where in the flat statistics those of this rank's rows, or columns, of each matrix are
        self._places = []
        for start, shape, work in zip(first, shapes, works, strict=False):
            # blockwise each rank's piece is a matrix
            own = range(math.prod(shape)) if self.engine.blockwise else None
            held = _held(work.compute, rank, shape) if own is None else np.array(own, np.int64)
            self._places.append(torch.from_numpy(start + held).to(self.engine.device))
        self._new = torch.empty(0)

    def buffers(self) -> Iterator[Tensor]:
        """Yield where the statistics are of what is computed here."""
        yield from self._places

    def begin(self, states: Mapping[int, Mapping[str, Any]], groups: Sequence[ParamGroup]) -> None:
        """Let all ranks have the statistics, and none of the new ones."""
        super().begin(states, groups)
        self._new = torch.zeros_like(self._flat)

    def on_orthogonal(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Normalize the slices, then scale."""
        per_slice = (-1, 1) if shape[0] >= shape[1] else (1, -1)
        owners = [self._shard_of[matrix] for matrix in matrices]
        for first, last, (beta2, eps) in _runs([_settings(self._groups[n]) for n in owners]):
            places = torch.stack([self._places[i] for i in matrices[first:last]])
            moments = self._flat[places].view(len(places), *per_slice).to(stack.dtype)
            divisor = self._divisors_of(owners[first:last])
            if isinstance(divisor, Tensor):
                divisor = divisor.view(-1, 1, 1).to(stack.dtype)
            batch = stack[first:last]
            normuon_(batch, moments, beta2, eps, divisor, shape=shape, reduce=reduce)
            self._new[places] = moments.view_as(places).to(self._new.dtype)
        stack.mul_(self.arithmetic.scale(shape))

    def end(self) -> None:
        """Let all ranks have the new statistics."""
        self._agree(self._new)
        self._flat = self._new
        super().end()


class NamoRule(MatrixRule):
    """Whole matrices by norms that are known before they are orthogonalized."""

    method: Moment2MethodT = "namo"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._segments = [MatrixRuns.of(shard, self.engine.device) for shard in self.shards]
        self._factors: dict[int, Tensor] = {}

    def buffers(self) -> Iterator[Tensor]:
        """Yield where the matrices of what is stored are."""
        for segments in self._segments:
            yield from segments.tensors

    def on_wave(self, wave: int, moving: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Compute the factors of the matrices of a wave, the same on all ranks of the group."""
        arrived = self.engine.arrivals[wave]
        if not arrived:
            return
        sizes = [self._sizes[place] for place in arrived]
        total = torch.zeros(2, sum(sizes), dtype=torch.float64, device=self.engine.device)
        parts = dict(zip(arrived, torch.split(total, sizes, dim=1), strict=True))
        for place, values in moving.items():
            for norms, value in zip(parts[place], values, strict=True):
                norms.copy_(self._segments[place].square_sums(value))
        if not self._apart:
            dist.all_reduce(total, group=self.engine.ranks.group)
        moments = torch.split(self._flat, self._sizes)
        for place, both in parts.items():
            running = moments[place].double()
            settings = *_settings(self._groups[place]), self._divisors_of([place])
            self._factors[place] = namo_(running, both[0], both[1], *settings)
            moments[place].copy_(running.clamp_(max=torch.finfo(torch.float32).max))

    def on_orthogonal(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Multiply by factor and scale."""
        places = [(self._shard_of[matrix], matrix) for matrix in matrices]
        found = [self._factors[place][m - self.engine.first[place]] for place, m in places]
        factors = torch.stack(found) * self.arithmetic.scale(shape)
        stack.mul_(factors.to(stack.dtype).view(-1, 1, 1))


RULES: dict[Moment2MethodT, type[Rule]] = {
    "adamuon": AdaMuonRule,
    "normuon": NorMuonRule,
    "namo": NamoRule,
}


def _settings(group: ParamGroup) -> tuple[float, float]:
    return group["beta2"], group["eps"]


def _held(layout: Layout, rank: int, statistic: tuple[int, ...]) -> Int64Array:
    """Return the rows, or columns, of a matrix that a rank has, in its order; int64."""
    dim = 0 if statistic[1] == 1 else 1
    found = np.zeros((layout.local_shape(rank) or (0, 0))[dim], np.int64)
    for row, column, height, width, offset, stride in layout.piece(rank).table[:, 1:7].tolist():
        first, length = ((row, height), (column, width))[dim]
        at = (offset // stride, offset % stride)[dim]
        found[at : at + length] = range(first, first + length)
    return found


def _runs[T](values: Iterable[T]) -> Iterator[tuple[int, int, T]]:
    """Yield (first, last + 1, value) of neighbours that are equal."""
    first = 0
    for value, members in groupby(values):
        last = first + sum(1 for _ in members)
        yield first, last, value
        first = last
