"""The second-moment rules of adaptive Muon, each beside the matrices that one engine computes.

Note [Where statistics live]
    AdaMuon's are element-wise: they are stored like the weights and act on updates that came back.
    NorMuon's live where a matrix is computed; every rank has room for all of a matrix's, and what
    it does not compute on stays stale until :meth:`NorMuonRule.complete`. NAMO's are one number a
    matrix and the same on all ranks: the norms of gradients and directions are summed over the
    stored pieces, in one all-reduce for all matrices of a group.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.math.moments import (
    Moment2MethodT,
    adamuon_,
    namo_,
    normuon_,
    statistic_shape,
)
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.engine import MatrixEngine
from megatron_eopt.optimizers.orthogonalization import Orthogonalization
from megatron_eopt.optimizers.segments import Segments, SquareNorms
from megatron_eopt.optimizers.stored import Stored, storage_layouts

__all__ = ["AdaMuonRule", "Coefficients", "NamoRule", "NorMuonRule", "Rule", "Served", "make_rule"]


class Coefficients(NamedTuple):
    """Settings of one parameter in one step.

    Attributes:
        beta2: Decay of the running statistic.
        eps: Smallest divisor, or what is added to it.
        divisor: Bias correction, see :func:`megatron_eopt.math.moments.correction`.
    """

    beta2: float
    eps: float
    divisor: float


@dataclass(frozen=True)
class Served:
    """The parameters that one engine serves.

    Attributes:
        engine: The engine.
        params: Local weights.
        stored: How the ranks of the group store each parameter.
        group: The ranks; None for one process.
        device: Where the tensors live.
        blockwise: Whether each rank's piece counts as a matrix of its own.
    """

    engine: MatrixEngine
    params: tuple[Tensor, ...]
    stored: tuple[Stored, ...]
    group: dist.ProcessGroup | None
    device: torch.device
    blockwise: bool

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)


def matrix_shapes(parameter: Stored, rank: int, blockwise: bool) -> list[tuple[int, int]]:
    """Return the shape of each matrix of a parameter; blockwise of this rank's pieces."""
    if not blockwise:
        return [matrix.shape for matrix in parameter.split.matrices]
    layouts = storage_layouts(parameter)
    return [layout.compact().local_shape(rank) or (0, 0) for layout in layouts]


def empty_statistics(
    method: Moment2MethodT, param: Tensor, shapes: Sequence[tuple[int, int]]
) -> Tensor:
    """Return zeroed statistics of a parameter: of one matrix in its shape, of several in a row."""
    if method == "adamuon":
        return torch.zeros_like(param, requires_grad=False)
    statistics = [statistic_shape(method, *shape) for shape in shapes]
    shape = statistics[0] if len(shapes) == 1 else (sum(map(_elements, statistics)),)
    return param.new_zeros(shape, requires_grad=False)


class Rule:
    """What the rules have in common: one instance per engine.

    Args:
        served: The engine and its parameters.
        orthogonalization: Orthogonalizes and knows the scale of a shape.
    """

    def __init__(self, served: Served, orthogonalization: Orthogonalization) -> None:
        self.served = served
        self.orthogonalization = orthogonalization
        self.counts = [len(parameter.split.matrices) for parameter in served.stored]
        self.shapes = [matrix_shapes(p, served.rank, served.blockwise) for p in served.stored]
        self.orthogonal_already = False
        self._coefficients: list[Coefficients] = []

    def begin(
        self,
        moments: Sequence[Tensor],
        grads: Sequence[Tensor],
        directions: Sequence[Tensor],
        coefficients: Sequence[Coefficients],
    ) -> None:
        """Prepare a step; collective over the group.

        Args:
            moments: Statistics of every parameter, changed in place during the step.
            grads: Raw gradients.
            directions: What will be orthogonalized.
            coefficients: Settings of every parameter.
        """
        self._coefficients = [
            c for c, n in zip(coefficients, self.counts, strict=True) for _ in range(n)
        ]

    def update(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Replace directions by what travels back; the engine's callback."""
        if not self.orthogonal_already:
            stack.copy_(self.orthogonalization.orthogonal(stack, reduce, shape))
        self.on_orthogonal(stack, matrices, reduce, shape)

    def on_orthogonal(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Act on the orthogonal factors of whole matrices, or slabs of them, in place."""

    def finish(self, updates: list[Tensor]) -> None:
        """Act on the stored updates, in place."""


class AdaMuonRule(Rule):
    """Entries by their own second moments, on stored updates."""

    def __init__(self, served: Served, orthogonalization: Orthogonalization) -> None:
        super().__init__(served, orthogonalization)
        self._per_parameter: list[Coefficients] = []
        self._moments: Sequence[Tensor] = ()
        self._scales = [
            [orthogonalization.scale(s) if s[0] else 0.0 for s in m] for m in self.shapes
        ]
        self._segments = {
            i: Segments.of(served.stored[i], served.rank, served.device)
            for i, scales in enumerate(self._scales)
            if len(set(scales)) > 1
        }
        self._factors = {i: s.per_run(self._scales[i]) for i, s in self._segments.items()}

    def begin(
        self,
        moments: Sequence[Tensor],
        grads: Sequence[Tensor],
        directions: Sequence[Tensor],
        coefficients: Sequence[Coefficients],
    ) -> None:
        """Remember what :meth:`finish` needs."""
        self._moments = moments
        self._per_parameter = list(coefficients)

    def finish(self, updates: list[Tensor]) -> None:
        """Divide by the roots of the second moments, then scale each matrix by its shape."""
        for first, last, _ in _runs([(c.beta2, c.eps) for c in self._per_parameter]):
            run = self._per_parameter[first:last]
            stored = list(self._moments[first:last])
            mine = updates[first:last]
            exact = [m.to(u.dtype) for m, u in zip(stored, mine, strict=True)]
            adamuon_(mine, exact, run[0].beta2, run[0].eps, [c.divisor for c in run])
            if any(m.dtype != e.dtype for m, e in zip(stored, exact, strict=True)):
                torch._foreach_copy_(stored, exact)
        uniform = [i for i in range(len(updates)) if i not in self._segments]
        if uniform:
            factors = [self._scales[i][0] for i in uniform]
            torch._foreach_mul_([updates[i] for i in uniform], factors)
        for i, segments in self._segments.items():
            segments.multiply_(updates[i], self._factors[i])


class NorMuonRule(Rule):
    """Rows or columns by their mean squares, where each matrix is computed."""

    def __init__(self, served: Served, orthogonalization: Orthogonalization) -> None:
        super().__init__(served, orthogonalization)
        shapes = [shape for matrices in self.shapes for shape in matrices]
        self._first = [0, *accumulate(self.counts)]
        self._statistics = [(rows, 1) if rows >= cols else (1, cols) for rows, cols in shapes]
        self._windows = [self._window(index) for index in range(len(shapes))]
        self._moments: Sequence[Tensor] = ()
        self._views: list[Tensor] = []

    def begin(
        self,
        moments: Sequence[Tensor],
        grads: Sequence[Tensor],
        directions: Sequence[Tensor],
        coefficients: Sequence[Coefficients],
    ) -> None:
        """Find each matrix's statistics; the views are kept while the tensors are the same."""
        super().begin(moments, grads, directions, coefficients)
        same = len(self._moments) == len(moments) and all(
            a is b for a, b in zip(self._moments, moments, strict=True)
        )
        if not same:
            self._moments = tuple(moments)
            self._views = [v for i, m in enumerate(moments) for v in self._views_of(i, m)]

    def on_orthogonal(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Normalize the slices, then scale."""
        for first, last, (beta2, eps, divisor) in _runs([self._coefficients[i] for i in matrices]):
            views = [self._views[i] for i in matrices[first:last]]
            moments = torch.stack(views).to(stack.dtype)
            batch = stack[first:last]
            normuon_(batch, moments, beta2, eps, divisor, shape=shape, reduce=reduce)
            torch._foreach_copy_(views, list(moments.unbind()))
        stack.mul_(self.orthogonalization.scale(shape))

    def complete(self, moments: Mapping[int, Tensor]) -> None:
        """Bring statistics that other ranks computed up to date; collective over the group.

        Args:
            moments: Statistics by the parameter's number.
        """
        if self.served.group is None or self.served.blockwise or not moments:
            return
        known = {number: torch.zeros_like(moment) for number, moment in moments.items()}
        for number, moment in moments.items():
            places = range(self._first[number], self._first[number + 1])
            parts = self._views_of(number, known[number])
            for index, part, mine in zip(
                places, parts, self._views_of(number, moment), strict=True
            ):
                if self._is_source(index):
                    part.copy_(mine)
        total = torch.cat([part.view(-1) for part in known.values()])
        dist.all_reduce(total, group=self.served.group)
        values = torch.split(total, [moment.numel() for moment in moments.values()])
        for moment, value in zip(moments.values(), values, strict=True):
            moment.copy_(value.view_as(moment))

    def _window(self, index: int) -> tuple[int, int, int]:
        """Return (dimension, start, length) of what this rank computes of a statistic."""
        rows, cols = self._statistics[index]
        if self.served.blockwise:
            return 0, 0, rows
        piece = self.served.engine.work.matrices[index].compute.piece(self.served.rank)
        if not len(piece):
            return 0, 0, 0
        if cols > 1:
            return 1, int(piece.column[0]), int(piece.width[0])
        start, length = int(piece.row.min()), int(piece.bottom.max() - piece.row.min())
        if int(piece.area.sum()) != length * int(piece.width[0]):
            raise ConfigurationError(
                "tp_mode",
                "distributed",
                f"needs adjacent rows on each rank, and {self.served.engine.names[index]!r} has "
                "others between them",
                "Use exchange",
            )
        return 0, start, length

    def _is_source(self, index: int) -> bool:
        """Whether this rank is the one of those with the same statistics that speaks for them."""
        piece = self.served.engine.work.matrices[index].compute.piece(self.served.rank)
        if not len(piece):
            return False
        across = piece.column if self._statistics[index][1] == 1 else piece.row
        return bool(piece.source[0]) and int(across.min()) == 0

    def _views_of(self, number: int, moment: Tensor) -> list[Tensor]:
        """Return what this rank computes of the statistics of one parameter's matrices."""
        places = slice(self._first[number], self._first[number + 1])
        shapes = self._statistics[places]
        parts = torch.split(moment.view(-1), [rows * cols for rows, cols in shapes])
        return [
            part.view(shape).narrow(*window)
            for part, shape, window in zip(parts, shapes, self._windows[places], strict=True)
        ]


class NamoRule(Rule):
    """Whole matrices by norms that are known before they are orthogonalized."""

    def __init__(self, served: Served, orthogonalization: Orthogonalization) -> None:
        super().__init__(served, orthogonalization)
        group = None if served.blockwise else served.group
        self._norms = SquareNorms(served.stored, served.rank, group, served.device)
        self._factors = torch.empty(0)
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def begin(
        self,
        moments: Sequence[Tensor],
        grads: Sequence[Tensor],
        directions: Sequence[Tensor],
        coefficients: Sequence[Coefficients],
    ) -> None:
        """Compute every matrix's factor, the same on all ranks of the group."""
        super().begin(moments, grads, directions, coefficients)
        of_grads, of_directions = self._norms.of([grads, directions])
        running = torch.cat([moment.view(-1) for moment in moments]).to(of_grads.dtype)
        factors = [
            namo_(running[a:b], of_grads[a:b], of_directions[a:b], *coefficient)
            for a, b, coefficient in _runs(self._coefficients)
        ]
        self._factors = torch.cat(factors)
        # inf would stay, and make nan of the next mean
        running.clamp_(max=torch.finfo(moments[0].dtype).max)
        torch._foreach_copy_(list(moments), list(torch.split(running, self.counts)))

    def on_orthogonal(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Multiply by factor and scale."""
        key = tuple(matrices)
        if key not in self._indices:
            self._indices[key] = torch.tensor(key, device=stack.device)
        factors = self._factors[self._indices[key]] * self.orthogonalization.scale(shape)
        stack.mul_(factors.to(stack.dtype).view(-1, 1, 1))


RULES: dict[Moment2MethodT, type[Rule]] = {
    "adamuon": AdaMuonRule,
    "normuon": NorMuonRule,
    "namo": NamoRule,
}


def make_rule(method: Moment2MethodT, served: Served, orthogonalization: Orthogonalization) -> Rule:
    """Return the rule of a method for one engine."""
    return RULES[method](served, orthogonalization)


def _runs[T](values: Sequence[T]) -> Iterator[tuple[int, int, T]]:
    """Yield (first, last + 1, value) of neighbours that are equal."""
    first = 0
    for value, members in groupby(values):
        last = first + sum(1 for _ in members)
        yield first, last, value
        first = last


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
