"""Adaptive Muon on sharded parameters: AdaMuon, NorMuon and NAMO.

Note [Where statistics live]
    AdaMuon has one second moment per element, sharded like the weight and applied to updates after
    they return. NorMuon and NAMO have a few numbers per matrix, and every rank that stores a shard
    of the parameter keeps all of them. Since any rank may compute any matrix, each step shares them
    with the whole group, and NorMuon shares the new values again. Each time is one max all-reduce:
    statistics are not negative, and ranks contribute zeros for what they do not store. NAMO sums
    squared norms over the ranks, with one all-reduce per wave.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base import gpu
from megatron_eopt.base.names import MOMENT2, MOMENTUM, STEP, Int64Array
from megatron_eopt.layouts import Layout
from megatron_eopt.math.moments import (
    Moment2MethodT,
    adamuon_,
    correction,
    namo_,
    normuon_,
    statistic_shape,
)
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.optimizers.exchange import ExchangeConfig, ParamWithGrad
from megatron_eopt.optimizers.muon_rule import MuonRule
from megatron_eopt.optimizers.stored_matrices import MatrixSums, StoredMatrices
from megatron_eopt.optimizers.update_rule import ParamGroup, State, UnshardedState
from megatron_eopt.storage.shard import ParamShard


class AdaptiveMuonRule(MuonRule):
    """Adaptive Muon as an update rule; see Note [Where statistics live]."""

    # statistics are written whatever the gradient scale is, so a step must not begin before the
    # host knows that it is not skipped
    fuses_grad_scale = False

    def __init__(
        self, optimizer: Any, shards: Sequence[ParamShard], exchange_config: ExchangeConfig
    ) -> None:
        super().__init__(optimizer, shards, exchange_config)
        self._statistics = [
            [
                statistic_shape(optimizer.moment2_method, *shape, transposed=shard.split.transposed)
                for shape in shapes
            ]
            for shard, shapes in zip(shards, self.shapes, strict=True)
        ]
        if optimizer.bias_correction:
            self.counts_steps = True
            self.optional_state -= {STEP}
        # statistics are taken of orthogonal factors, which are scaled after
        self._scales_of = lambda shape: ()
        self._lasting: list[Tensor] = []  # index tensors, which live between steps

    def buffers(self) -> Iterator[Tensor]:
        """Yield the tensors that stay in memory between steps, other than weights and state."""
        yield from super().buffers()
        yield from self._lasting

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Create momenta, statistics and step counters."""
        super().init(groups, state)
        for _, param, number in self.numbered(groups):
            if MOMENT2 not in state[param]:
                state[param][MOMENT2] = self._empty_statistics(param, number)

    def _empty_statistics(self, param: Tensor, number: int) -> Tensor:
        raise NotImplementedError

    def _directions(
        self, items: Mapping[int, ParamWithGrad], arriving: Sequence[int], outs: Any
    ) -> Mapping[int, Tensor]:
        return super()._directions(items, arriving, None)


class AdaMuonRule(AdaptiveMuonRule):
    """AdaMuon: divides each element of the stored updates by the root of its second moment."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        scale = self.optimizer.orthogonalization.scale
        self._scales = [
            [
                scale(shape[::-1] if shard.split.transposed else shape) if shape[0] else 0.0
                for shape in shapes
            ]
            for shard, shapes in zip(self.shards, self.shapes, strict=True)
        ]
        # parameters whose matrices have different scales
        self._stored = {
            number: StoredMatrices(self.shards[number], self.exchange.device)
            for number, scales in enumerate(self._scales)
            if len(set(scales)) > 1
        }
        self._lasting = [tensor for one in self._stored.values() for tensor in one.tensors]

    def is_sharded_like_param(self, kind: str, value: Any, param: Tensor) -> bool:
        """Whether a state has a number for each of the parameter's."""
        return kind in (MOMENTUM, MOMENT2)

    def _empty_statistics(self, param: Tensor, number: int) -> Tensor:
        return torch.zeros_like(param, requires_grad=False)

    def _apply(self, items: Sequence[ParamWithGrad], updates: Mapping[int, Tensor]) -> None:
        """Divide by the roots of the second moments, scale by shape, then update the weights."""
        for first, last, (beta2, eps) in _runs(_settings(item.group) for item in items):
            run = items[first:last]
            moments = [item.state[MOMENT2] for item in run]
            run_updates = [updates[item.number] for item in run]
            # fp16 would round eps and the squares of small updates to 0
            wide = [u.float() if u.dtype.itemsize == 2 else u for u in run_updates]
            # one dtype for each pair; what was converted is copied back below
            exact = [m.to(u.dtype) for m, u in zip(moments, wide, strict=True)]
            adamuon_(wide, exact, beta2, eps, [self._divisor(item, beta2) for item in run])
            for stored, computed in ((run_updates, wide), (moments, exact)):
                if any(s is not c for s, c in zip(stored, computed, strict=True)):
                    torch._foreach_copy_(stored, computed)
        numbers = [item.number for item in items]
        uniform = [number for number in numbers if number not in self._stored]
        if uniform:
            factors = [self._scales[number][0] for number in uniform]
            torch._foreach_mul_([updates[number] for number in uniform], factors)
        for number in self._stored.keys() & numbers:
            # Q, K and V have other shapes, and so other scales, within one tensor
            self._stored[number].multiply_(updates[number], self._scales[number])
        super()._apply(items, updates)

    def _divisor(self, item: ParamWithGrad, beta2: float) -> float:
        corrected = self.optimizer.bias_correction
        return correction(beta2, float(item.state[STEP]) if corrected else 1.0, corrected)


class MatrixMomentRule(AdaptiveMuonRule):
    """Base of NorMuon and NAMO: in a step, every rank has all statistics in one flat tensor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shard_of = [n for n, shapes in enumerate(self.shapes) for _ in shapes]
        self._sizes = [sum(map(math.prod, shapes)) for shapes in self._statistics]
        self._coefficients: list[tuple[float, float]] = []  # (beta2, eps) of each parameter
        self._flat = torch.empty(0)
        self._divisors: Tensor | None = None
        # decays of the statistics, and the same on the device
        self._decays: tuple[list[float], Tensor] = [], torch.empty(0)

    def is_sharded_like_param(self, kind: str, value: Any, param: Tensor) -> bool:
        """Whether a state has a number for each of the parameter's."""
        return kind == MOMENTUM

    def _empty_statistics(self, param: Tensor, number: int) -> Tensor:
        shapes = self._statistics[number]
        shape = shapes[0] if len(shapes) == 1 else (self._sizes[number],)
        return param.new_zeros(shape, requires_grad=False)

    def unsharded_state(
        self, groups: Sequence[ParamGroup], state: State
    ) -> Iterator[UnshardedState]:
        """Yield the statistics; all ranks that store a shard of the parameter have them."""
        for _, param, number in self.numbered(groups):
            shard, moment = self.shards[number], state[param][MOMENT2]
            rank, blockwise = shard.ranks.rank, self.exchange.blockwise
            slab = (rank, shard.ranks.size) if blockwise else shard.slab
            first = min(int(layout.boxes.rank.min()) for layout in shard.layouts)
            parts = torch.split(moment.view(-1), [math.prod(s) for s in self._statistics[number]])
            for matrix, part in enumerate(parts):
                yield UnshardedState(
                    number,
                    matrix,
                    (MOMENT2,),
                    part.view(self._statistics[number][matrix]),
                    writes=blockwise or rank == first,
                    slab=slab,
                    container=state[param],
                )

    def _run(self, items: Mapping[int, ParamWithGrad], groups: Sequence[ParamGroup]) -> None:
        self._share(items, groups)
        super()._run(items, groups)
        self._keep(items)

    def _share(self, items: Mapping[int, ParamWithGrad], groups: Sequence[ParamGroup]) -> None:
        """Share all statistics and their bias corrections with all ranks."""
        by_shard = [groups[self.group_of[number]] for number in range(len(self.shards))]
        self._coefficients = [_settings(group) for group in by_shard]
        corrected, device = self.optimizer.bias_correction, self.exchange.device
        everything = torch.zeros(sum(self._sizes), device=device)
        if corrected:
            zero = torch.zeros((), device=self._device_of_counts)
            counts = [items[n].state[STEP] if n in items else zero for n in range(len(by_shard))]
            everything = torch.cat([everything, torch.stack(counts).to(device)])
        # views: the copy and the all-reduce below fill both parts
        self._flat, steps = everything.tensor_split([sum(self._sizes)])
        if items:
            torch._foreach_copy_(*self._pairs(items))
        # a rank that computes a matrix may store none of the parameter, and gets its statistics
        # here
        self._reduce_max(everything)
        if corrected:
            # in float64, because 1 - beta2^step cancels in the first steps
            decays = [beta2 for beta2, _ in self._coefficients]
            if decays != self._decays[0]:
                self._decays = decays, gpu.uploaded(np.array(decays, np.float64), device)
            # parameters without a gradient have step 0, and are not updated
            self._divisors = 1 - self._decays[1] ** steps.double().clamp(min=1)

    def _keep(self, items: Mapping[int, ParamWithGrad]) -> None:
        """Write the statistics back to the states."""
        if items:
            statistics, moments = self._pairs(items)
            # inf would persist, and turn the next mean into nan
            pairs = zip(statistics, moments, strict=True)
            most = [min(torch.finfo(x.dtype).max for x in pair) for pair in pairs]
            torch._foreach_clamp_max_(statistics, most)
            torch._foreach_copy_(moments, statistics)

    def _pairs(self, items: Mapping[int, ParamWithGrad]) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the flat statistics, and the tensors in the parameters' states."""
        parts = torch.split(self._flat, self._sizes)
        moments = [item.state[MOMENT2] for item in items.values()]
        return [parts[n].view_as(m) for n, m in zip(items, moments, strict=True)], moments

    def _reduce_max(self, values: Tensor) -> None:
        if self.exchange.sharing is not None:
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.exchange.sharing)

    def _divisors_of(self, numbers: Sequence[int]) -> Tensor | float:
        """Return the bias corrections of parameters, float64 ``(n,)``; 1.0 without correction."""
        # an index that is a list would have to be copied to the device
        divisors = self._divisors
        return 1.0 if divisors is None else torch.stack([divisors[n] for n in numbers])


class NorMuonRule(MatrixMomentRule):
    """NorMuon: divides rows or columns by their root mean squares where a matrix is computed."""

    fuses_grad_scale = True
    takes_slabs = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # for each matrix, the indices of this rank's rows or columns in the flat statistics
        self._places = self._lasting
        start, works = 0, iter(self.exchange.placements)
        for shape, work in zip((s for some in self._statistics for s in some), works, strict=True):
            if self.exchange.blockwise:
                indices = np.arange(math.prod(shape))
            else:
                indices = _held(work.compute, self.exchange.ranks.rank, shape)
            self._places.append(torch.tensor(start + indices, device=self.exchange.device))
            start += math.prod(shape)
        self._new = torch.empty(0)

    def _share(self, items: Mapping[int, ParamWithGrad], groups: Sequence[ParamGroup]) -> None:
        super()._share(items, groups)
        self._new = torch.zeros_like(self._flat)

    def _update(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Orthogonalize, normalize rows or columns, then scale."""
        super()._update(stack, matrices, reduce, shape)
        turned = self.exchange.transposed[matrices[0]]
        out_in = self.exchange.out_in(matrices[0], shape)
        per_slice = (-1, 1) if out_in[0] >= out_in[1] else (1, -1)
        owners = [self._shard_of[matrix] for matrix in matrices]
        for first, last, (beta2, eps) in _runs(self._coefficients[n] for n in owners):
            places = torch.stack([self._places[i] for i in matrices[first:last]])
            moments = self._flat[places].view(len(places), *per_slice)
            divisor = self._divisors_of(owners[first:last])
            if isinstance(divisor, Tensor):
                divisor = divisor.view(-1, 1, 1).to(moments.dtype)
            # as (outputs, inputs), the shape that `normuon_` is told
            batch = stack[first:last].mT if turned else stack[first:last]
            normuon_(batch, moments, beta2, eps, divisor, shape=out_in, reduce=reduce)
            # other places stay 0, which the maximum over ranks in `_keep` passes over
            self._new[places] = moments.view_as(places)
        stack.mul_(self.optimizer.orthogonalization.scale(out_in))

    def _keep(self, items: Mapping[int, ParamWithGrad]) -> None:
        """Share the new statistics with all ranks, and write them to the states."""
        self._reduce_max(self._new)
        if self.grad_scale is None:
            self._flat = self._new
        else:
            # a step with gradients that are not finite changes nothing
            self._flat = torch.where(self.grad_scale.isnan(), self._flat, self._new)
        super()._keep(items)


class NamoRule(MatrixMomentRule):
    """NAMO: scales whole matrices by norms that are known before orthogonalization."""

    takes_slabs = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._sums = MatrixSums(self.shards, self.exchange.device, self.exchange.sharing)
        self._lasting = self._sums.tensors
        self._factors: dict[int, Tensor] = {}

    def _directions(
        self, items: Mapping[int, ParamWithGrad], arriving: Sequence[int], outs: Any
    ) -> Mapping[int, Tensor]:
        """Also compute the factor of each matrix in the wave, the same on all ranks."""
        directions = super()._directions(items, arriving, outs)
        # no collective then, on any rank
        if not arriving:
            return directions
        own_sums = {}
        for number, item in items.items():
            assert item.param.grad is not None
            sums_of = self._sums.stored[number].square_sums
            own_sums[number] = sums_of(item.param.grad), sums_of(directions[number])
        moments = torch.split(self._flat, self._sizes)
        for number, both in self._sums.totals(arriving, own_sums, kinds=2).items():
            # the square of a large norm overflows float32; clamped below, it cannot stay inf
            running = moments[number].double()
            settings = *self._coefficients[number], self._divisors_of([number])
            self._factors[number] = namo_(running, both[0], both[1], *settings)
            moments[number].copy_(running.clamp_(max=torch.finfo(torch.float32).max))
        return directions

    def _update(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Orthogonalize, then multiply by factor and scale."""
        super()._update(stack, matrices, reduce, shape)
        owners = [(self._shard_of[matrix], matrix) for matrix in matrices]
        matrix_factors = [self._factors[n][m - self.exchange.first[n]] for n, m in owners]
        out_in = self.exchange.out_in(matrices[0], shape)
        factors = torch.stack(matrix_factors) * self.optimizer.orthogonalization.scale(out_in)
        stack.mul_(factors.to(stack.dtype).view(-1, 1, 1))


RULES: dict[Moment2MethodT, type[AdaptiveMuonRule]] = {
    "adamuon": AdaMuonRule,
    "normuon": NorMuonRule,
    "namo": NamoRule,
}


def _settings(group: ParamGroup) -> tuple[float, float]:
    return group["beta2"], group["eps"]


def _held(layout: Layout, rank: int, statistic: tuple[int, ...]) -> Int64Array:
    """Return the rows (or columns) of a matrix that a rank holds, in local order; int64."""
    dim = 0 if statistic[1] == 1 else 1
    indices = np.zeros((layout.local_shape(rank) or (0, 0))[dim], np.int64)
    # the table's columns ROW to STRIDE
    for row, column, height, width, offset, stride in layout.piece(rank).table[:, 1:7].tolist():
        first, length = ((row, height), (column, width))[dim]
        at = (offset // stride, offset % stride)[dim]
        indices[at : at + length] = range(first, first + length)
    return indices


def _runs[T](values: Iterable[T]) -> Iterator[tuple[int, int, T]]:
    """Yield ``(first, last + 1, value)`` for each run of equal neighbours."""
    first = 0
    for value, members in groupby(values):
        last = first + sum(1 for _ in members)
        yield first, last, value
        first = last
