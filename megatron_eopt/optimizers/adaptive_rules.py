"""How adaptive Muon normalizes orthogonal factors: one rule for each kind of second moment.

Note [Where statistics live]
    AdaMuon's are element by element: they are cut like the weights and act on updates that came
    back. NorMuon's live where a matrix is computed; who stores or computes part of a parameter has
    room for all of its statistics, and what a rank does not compute on stays stale until they are
    completed. NAMO's are one number a matrix and the same on all ranks: the norms of gradients and
    directions are summed over what the ranks store, in one all-reduce for the matrices of a wave.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MOMENT2
from megatron_eopt.math.moments import Moment2MethodT, adamuon_, namo_, normuon_, statistic_shape
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.orthogonalize import Orthogonalization
from megatron_eopt.optimizers.engine import MatrixEngine
from megatron_eopt.optimizers.matrix_runs import MatrixRuns
from megatron_eopt.stores.shard import Shard


class Coefficients(NamedTuple):
    """Settings of one parameter in one step: decay, smallest divisor, bias correction."""

    beta2: float
    eps: float
    divisor: float


class Known(NamedTuple):
    """What a rank knows of a statistic: (dimension, start, length), and whether it writes it."""

    window: tuple[int, int, int]
    writes: bool


class Rule:
    """What the rules have in common: one instance per engine.

    Parameters are numbered as the engine's shards are; those that rest are in no mapping, and what
    is computed for them is thrown away.
    """

    method: Moment2MethodT

    def __init__(
        self, engine: MatrixEngine, shards: Sequence[Shard], arithmetic: Orthogonalization
    ) -> None:
        self.engine = engine
        self.shards = shards
        self.arithmetic = arithmetic
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
        self._shard_of = [n for n, shapes in enumerate(self.shapes) for _ in shapes]
        self._coefficients: Mapping[int, Coefficients] = {}
        self._states: Mapping[int, Mapping[str, Any]] = {}
        self._prepare()

    def _prepare(self) -> None:
        """Compute what is the same in all steps."""

    def begin(
        self,
        states: Mapping[int, Mapping[str, Any]],
        coefficients: Mapping[int, Coefficients],
    ) -> None:
        """Prepare a step with the states and settings of the parameters that do not rest.

        Statistics are looked up in them when it is their turn: they may come to the device later.
        """
        self._states, self._coefficients = states, coefficients

    def on_wave(self, wave: int, moving: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Look at gradients and directions of the parameters that a wave is the first to need."""

    def on_orthogonal(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Act on the orthogonal factors of whole matrices, or slabs of them, in place."""

    def finish(self, updates: Mapping[int, Tensor]) -> None:
        """Act on stored updates, in place."""

    def complete(self, moments: Mapping[int, Tensor]) -> None:
        """Bring statistics that other ranks computed up to date; collective over the group."""

    def known(self, place: int, matrix: int) -> Known | None:
        """Return what this rank knows of a matrix's statistic; None for nothing."""
        return None

    def views_of(self, place: int, moment: Tensor) -> list[Tensor]:
        """Return the statistics of a parameter's matrices, which lie one after another."""
        parts = torch.split(moment.view(-1), [math.prod(s) for s in self.statistics[place]])
        return [part.view(shape) for part, shape in zip(parts, self.statistics[place], strict=True)]

    def _moment_of(self, place: int) -> Tensor:
        moment: Tensor = self._states[place][MOMENT2]
        return moment

    def buffers(self) -> Iterator[Tensor]:
        """Yield what lives on between steps apart from state."""
        return iter(())

    def _settings_of(self, matrix: int) -> Coefficients:
        return self._coefficients.get(self._shard_of[matrix], Coefficients(0.0, 1.0, 1.0))


class AdaMuonRule(Rule):
    """Entries by their own second moments, on stored updates."""

    method: Moment2MethodT = "adamuon"

    def _prepare(self) -> None:
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
        for first, last, _ in _runs([self._coefficients[i][:2] for i in places]):
            run = places[first:last]
            settings = [self._coefficients[place] for place in run]
            moments = [self._moment_of(place) for place in run]
            mine = [updates[place] for place in run]
            # in fp16 eps is 0, and so are the squares of small updates
            wide = [u.float() if u.dtype.itemsize == 2 else u for u in mine]
            exact = [m.to(u.dtype) for m, u in zip(moments, wide, strict=True)]
            divisors = [item.divisor for item in settings]
            adamuon_(wide, exact, settings[0].beta2, settings[0].eps, divisors)
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


class NorMuonRule(Rule):
    """Rows or columns by their mean squares, where each matrix is computed."""

    method: Moment2MethodT = "normuon"

    def _prepare(self) -> None:
        self._flat = [shape for shapes in self.statistics for shape in shapes]
        self._known = [self._window(index) for index in range(len(self._flat))]
        self._views: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def known(self, place: int, matrix: int) -> Known | None:
        """Return what this rank computes of a matrix's statistic."""
        return self._known[self.engine.first[place] + matrix]

    def on_orthogonal(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Normalize the slices, then scale."""
        for first, last, (beta2, eps, divisor) in _runs([self._settings_of(i) for i in matrices]):
            views = [self._window_of(i) for i in matrices[first:last]]
            moments = torch.stack(views).to(stack.dtype)
            batch = stack[first:last]
            normuon_(batch, moments, beta2, eps, divisor, shape=shape, reduce=reduce)
            torch._foreach_copy_(views, list(moments.unbind()))
        stack.mul_(self.arithmetic.scale(shape))

    def complete(self, moments: Mapping[int, Tensor]) -> None:
        """Sum what each rank computes, as far as it speaks for it; collective over the group."""
        if self.engine.ranks.group is None or self.engine.blockwise:
            return
        sizes = [sum(map(math.prod, shapes)) for shapes in self.statistics]
        total = torch.zeros(sum(sizes), dtype=torch.float32, device=self.engine.device)
        values = torch.split(total, sizes)
        for place, moment in moments.items():
            pairs = zip(*(self.views_of(place, m) for m in (values[place], moment)), strict=True)
            for matrix, (to, its) in enumerate(pairs):
                part = self.known(place, matrix)
                if part is not None and part.writes:
                    to.narrow(*part.window).copy_(its.narrow(*part.window))
        dist.all_reduce(total, group=self.engine.ranks.group)
        for place, moment in moments.items():
            moment.copy_(values[place].view_as(moment))

    def _window_of(self, matrix: int) -> Tensor:
        """Return what this rank computes of a matrix's statistic, as a view of its state."""
        place = self._shard_of[matrix]
        known = self._known[matrix]
        assert known is not None, "a rank computes on what it knows"
        if place not in self._states:
            # it rests: what is computed is thrown away
            return torch.zeros(self._flat[matrix], device=self.engine.device).narrow(*known.window)
        moment = self._moment_of(place)
        cached = self._views.get(place)
        if cached is None or cached[0] is not moment:
            self._views[place] = cached = (moment, self.views_of(place, moment))
        view = cached[1][matrix - self.engine.first[place]]
        return view.narrow(*known.window)

    def _window(self, index: int) -> Known | None:
        rows, cols = self._flat[index]
        if self.engine.blockwise:
            return Known((0, 0, rows), True)
        piece = self.engine.work.matrices[index].compute.piece(self.engine.ranks.rank)
        if not len(piece):
            return None
        across = piece.column if cols == 1 else piece.row
        # of ranks that compute the same statistic the one with the first part of the matrix speaks
        writes = bool(piece.source[0]) and int(across.min()) == 0
        if cols > 1:
            return Known((1, int(piece.column[0]), int(piece.width[0])), writes)
        start, length = int(piece.row.min()), int(piece.bottom.max() - piece.row.min())
        if int(piece.area.sum()) != length * int(piece.width[0]):
            name = self.engine.names[index]
            rule = f"needs adjacent rows on each rank, and {name!r} has others between them"
            raise ConfigurationError("tp_mode", "distributed", rule, "Use exchange")
        return Known((0, start, length), writes)


class NamoRule(Rule):
    """Whole matrices by norms that are known before they are orthogonalized."""

    method: Moment2MethodT = "namo"

    def _prepare(self) -> None:
        self._segments = [MatrixRuns.of(shard, self.engine.device) for shard in self.shards]
        self._factors: dict[int, Tensor] = {}

    def buffers(self) -> Iterator[Tensor]:
        """Yield where the matrices of what is stored are."""
        for segments in self._segments:
            yield from segments.tensors

    def known(self, place: int, matrix: int) -> Known | None:
        """Every rank knows everything; the first one writes."""
        return Known((0, 0, 1), self.engine.blockwise or self.engine.ranks.rank == 0)

    def on_wave(self, wave: int, moving: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Compute the factors of the matrices of a wave, the same on all ranks of the group."""
        arrived = self.engine.arrivals[wave]
        if not arrived:
            return
        sizes = [len(self.shapes[place]) for place in arrived]
        total = torch.zeros(2, sum(sizes), dtype=torch.float64, device=self.engine.device)
        parts = dict(zip(arrived, torch.split(total, sizes, dim=1), strict=True))
        for place, values in moving.items():
            for norms, value in zip(parts[place], values, strict=True):
                norms.copy_(self._segments[place].square_sums(value))
        if self.engine.ranks.group is not None and not self.engine.blockwise:
            dist.all_reduce(total, group=self.engine.ranks.group)
        for place, both in parts.items():
            settings = self._coefficients.get(place)
            if settings is None:
                self._factors[place] = torch.zeros_like(both[0])
                continue
            moment = self._moment_of(place)
            running = moment.view(-1).to(torch.float64)
            self._factors[place] = namo_(running, both[0], both[1], *settings)
            # inf would stay, and make nan of the next mean
            moment.copy_(running.clamp_(max=torch.finfo(moment.dtype).max).view_as(moment))

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


def _runs[T](values: Sequence[T]) -> Iterator[tuple[int, int, T]]:
    """Yield (first, last + 1, value) of neighbours that are equal."""
    first = 0
    for value, members in groupby(values):
        last = first + sum(1 for _ in members)
        yield first, last, value
        first = last
