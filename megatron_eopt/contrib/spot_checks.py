"""Spot checks: a few matrices are computed by a second rank too, before a step changes anything.

Note [Spot checks]
    Each matrix has one owner, so a wrong product or message reaches all replicas alike, and
    comparing replicas does not find it. But any rank computes any matrix to the same bits. In
    ``1 / fraction`` steps each matrix is checked once, most often all in the same step. Before that
    step, their directions go to their owner and to a second rank, and both compute the updates.
    Three fingerprints must agree: that of either result, and that of what arrives where the
    parameter is stored. The step then uses these updates, and its waves do not compute them again.

    Calls are few: the differences of all fingerprints, each times an odd number, are summed over
    all ranks, and any sum but 0 stops all ranks. Equal matrices of an owner are computed in one
    stack, and whoever computes one of them again computes that stack, because batched products may
    round otherwise.

    Where every data-parallel rank computes all updates, nothing is computed twice: the ranks
    compare theirs. There a flipped gradient or momentum shows as well.

    What is seen: flips in products, in the memory of the ranks that compute, and in messages. What
    is not seen: flips before gradients are reduced, or in the only copy of a gradient, a momentum
    or a weight.
"""

import hashlib
import logging
import math
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import batched
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base import gpu
from megatron_eopt.base.agreement import device_of_collectives, gather_objects, gather_unique
from megatron_eopt.base.errors import SpotCheckError
from megatron_eopt.base.log import inform
from megatron_eopt.layouts import Layout, Matrix, Redistribution, WaveBatch
from megatron_eopt.layouts.assignment import plan_waves
from megatron_eopt.layouts.boxes import Boxes, weights_of
from megatron_eopt.math import standard_flops
from megatron_eopt.math.precision import matmul_precision
from megatron_eopt.optimizers.assigned_rule import AssignedRule
from megatron_eopt.optimizers.muon_rule import MuonRule
from megatron_eopt.optimizers.step_checks import PartT
from megatron_eopt.optimizers.update_rule import ParamGroup, State, UpdateRule

logger = logging.getLogger(__name__)

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_FACTOR = 0x1E3779B97F4A7C15
"""An odd factor on one of two differences, so that they do not add up to 0."""

_WAVE = 4
"""An owner's part of a wave is so many times as large as in a step, so that there are few calls."""

_TURN = 16
"""A step checks no more than this many waves of what a rank stores, because it keeps all until the
next one; what remains is checked in other steps."""

type _ViewT = tuple[tuple[int, int], tuple[int, int], int]
"""Sizes, strides and offset of a part of a flat tensor."""


def fingerprint(matrices: Tensor, first_row: int = 0) -> Tensor:
    """Return a sum of the bits of each matrix, int64, that any single flip changes.

    Fingerprints of pieces, modulo 2^64, add up to that of the matrix; row weights are odd.

    Args:
        matrices: Of shape ``(..., rows, cols)``; the result's is ``(...)``.
        first_row: The number of the first row in a whole matrix.
    """
    rows = matrices.view(_BITS[matrices.dtype.itemsize]).sum(-1, dtype=torch.int64)
    numbers = torch.arange(first_row, first_row + rows.shape[-1], device=matrices.device)
    return (rows * (2 * numbers + 1)).sum(-1)


def _weight(name: str) -> int:
    """Return an odd number with which a fingerprint counts in a sum of many, below 2^63."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1 | 1


@dataclass(frozen=True)
class _Drawn:
    """A matrix that can be drawn."""

    shard: int  # index of its shard
    layout: Layout
    name: str  # unique
    exchange: int  # index of the exchange that computes it
    index: int  # its index there
    copies: int  # how often it is stored; 0 if elements are stored in different numbers
    first: int  # the rank of the group that computes it, or one of them

    def views(self, rank: int) -> list[tuple[int, _ViewT, bool]]:
        """Return a rank's parts of it: first row, where it is, and whether it is the source."""
        table = zip(*(column.tolist() for column in _columns(self.layout.piece(rank))), strict=True)
        return [(row, ((h, w), (s, 1), o), bool(source)) for h, w, s, o, row, source in table]

    def pieces(self, stored: Tensor, rank: int) -> list[tuple[Tensor, int]]:
        """Return a rank's parts of it: view and first row."""
        return [(_view(stored, view), row) for row, view, _ in self.views(rank)]


def _view(stored: Tensor, view: _ViewT) -> Tensor:
    flat, (size, stride, offset) = stored.view(-1), view
    return flat.as_strided(size, stride, flat.storage_offset() + offset)


def _columns(boxes: Boxes) -> tuple[Any, ...]:
    return boxes.height, boxes.width, boxes.stride, boxes.offset, boxes.row, boxes.source


@dataclass(frozen=True)
class _Stack:
    """Matrices of equal shape that are computed in one call."""

    matrices: tuple[int, ...]  # their numbers
    ranks: tuple[int, ...]  # those of the group that compute it before the step


@dataclass(frozen=True)
class _Planned:
    """How some stacks are computed; matrices are in the order of the stacks."""

    numbers: tuple[int, ...]  # of the matrices
    ranks: tuple[tuple[int, ...], ...]  # those of the group that compute each
    redistribution: Redistribution
    copies: Tensor  # how often each matrix is stored, int64 (matrices,)
    weights: Tensor  # with which their fingerprints count in sums, int64 (matrices,)
    # pieces that this rank stores by first row, few enough to be put into one tensor: the place of
    # each one's matrix, int64 (pieces,); the shard, sizes, strides and offset of each
    arriving: list[tuple[int, Tensor, list[tuple[int, _ViewT]]]]


class SpotCheck:
    """Checks the matrices of one update rule; see Note [Spot checks].

    All ranks of its group create it together. ``replicas`` are ranks that store and compute the
    same as this one.
    """

    def __init__(self, update_rule: MuonRule, replicas: dist.ProcessGroup | None = None) -> None:
        self.rule, self._replicas = update_rule, replicas
        self._ranks, self._device = update_rule.exchange.ranks, update_rule.exchange.device
        place_of = {
            name: (number, index)
            for number, exchange in enumerate(update_rule.exchanges)
            for index, name in enumerate(exchange.names)
        }
        found = [
            (number, layout, name)
            for number, shard in enumerate(update_rule.shards)
            for layout, name in zip(shard.layouts, shard.matrix_names, strict=True)
        ]
        firsts = self._firsts([(layout, *place_of[name]) for _, layout, name in found])
        self._matrices = [
            _Drawn(number, layout, name, *place_of[name], _copies_of(layout), first)
            for (number, layout, name), first in zip(found, firsts, strict=True)
        ]
        device = torch.cuda.get_device_name(self._device) if gpu.is_there() else "CPU"
        mine = (f"{socket.gethostname()}, {self._device} {device}", device)
        self._hosts = gather_objects(mine, self._voters)
        kinds = Counter(kind for _, kind in self._hosts)
        # other devices round otherwise
        self._comparable = [
            len(kinds) == 1 if replicas is not None else kinds[self._hosts[m.first][1]] > 1
            for m in self._matrices
        ]
        self._stacks = self._stacked()
        self._turns: list[tuple[int, ...]] = []
        self._plans: dict[int, _Planned] = {}  # by turn
        # of a step: matrices that are checked, and updates, of which only their pieces count
        self._drawn: tuple[int, ...] = ()
        self._updates: dict[int, Tensor] = {}
        # this rank's part of the fingerprints
        self._seen = self._of_momenta = torch.empty(0)

    def _stacked(self) -> list[_Stack]:
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for number, matrix in enumerate(self._matrices):
            if self._comparable[number]:
                transposed = self.rule.exchanges[matrix.exchange].transposed[matrix.index]
                ranks: tuple[int, ...] = (matrix.first,)
                if self._replicas is None:
                    ranks += tuple(self._alike(ranks)[:1])
                alike[ranks, matrix.exchange, transposed, matrix.layout.shape].append(number)
        stacks = []
        for (ranks, exchange, _, shape), members in alike.items():
            most = self.rule.exchanges[exchange].most_in_stack(shape)
            stacks += [_Stack(part, ranks) for part in batched(members, most)]
        return stacks

    @property
    def wanted_turns(self) -> int:
        """In how many steps to check all matrices, so that each keeps a limited amount."""
        held = sum(
            (self._matrices[n].layout.boxes.held(self._ranks.size) for n in self._drawable_numbers),
            np.zeros(self._ranks.size, np.int64),
        )
        return max(1, math.ceil(held.max() / (_TURN * self.rule.exchange.wave_elements)))

    @property
    def _drawable_numbers(self) -> list[int]:
        return [number for stack in self._stacks for number in stack.matrices]

    def deal(self, turns: int) -> None:
        """Deal all matrices into turns with about equal work."""
        sizes = [self._size(stack) for stack in self._stacks]
        order = sorted(range(len(sizes)), key=lambda n: (-sizes[n], n))
        self._turns = [tuple(sorted(order[turn::turns])) for turn in range(turns)]

    def _size(self, stack: _Stack) -> int:
        return len(stack.matrices) * math.prod(self._matrices[stack.matrices[0]].layout.shape)

    @property
    def odd(self) -> int:
        """How many matrices are not checked, because no rank has an equal device."""
        return self._comparable.count(False)

    @property
    def _voters(self) -> dist.ProcessGroup | None:
        """The ranks whose results are compared."""
        return self._ranks.group if self._replicas is None else self._replicas

    def _firsts(self, places: Sequence[tuple[Layout, int, int]]) -> list[int]:
        """Return a rank that computes each matrix, of layout, exchange and index there.

        Of several, it is the one that is least busy, as is the rank after it.
        """
        size, firsts = self._ranks.size, [0] * len(places)
        busy = [0.0] * size
        costs = [standard_flops(*layout.shape) for layout, *_ in places]
        for at in sorted(range(len(places)), key=lambda at: (-costs[at], at)):
            _, exchange, index = places[at]
            computing = self.rule.exchanges[exchange].placements[index].compute.boxes.rank
            firsts[at] = min(
                np.unique(computing).tolist(),
                key=lambda rank: (busy[rank] + busy[(rank + 1) % size], rank),
            )
            for rank in (firsts[at], firsts[at] + 1):
                busy[rank % size] += costs[at]
        return firsts

    def _alike(self, but: Sequence[int]) -> list[int]:
        """Return other ranks of the group with equal devices, those after the first one first."""
        size, kind = self._ranks.size, self._hosts[but[0]][1]
        others = ((but[0] + far) % size for far in range(1, size))
        return [rank for rank in others if rank not in but and self._hosts[rank][1] == kind]

    @torch.no_grad()
    def run(self, turn: int, groups: Sequence[ParamGroup], state: State) -> Tensor | int:
        """Compute the matrices of a turn; collective; nothing changes.

        Returns:
            An integer whose sum over all ranks, modulo 2^64, is 0 unless updates differ, or
            momenta.
        """
        if not self._turns[turn]:
            return 0
        if turn not in self._plans:
            self._plans[turn] = self._new_plan([self._stacks[n] for n in self._turns[turn]])
        planned = self._plans[turn]
        self._drawn = planned.numbers
        self._of_momenta = torch.zeros_like(planned.weights)
        self._compute(planned, groups, state)
        for number, exchange in enumerate(self.rule.exchanges):
            mine = (m for m in (self._matrices[n] for n in self._drawn) if m.exchange == number)
            # statistics look at what the waves compute
            exchange.skipped = () if self.rule.stats is not None else {m.index for m in mine}
            exchange.insert_checked = self._insert
        if self._replicas is None:
            first, second, arrived = self._seen
            return _total(first - arrived + _FACTOR * (second - arrived), planned)
        computed, arrived = self._seen
        total = _total(computed + 3 * arrived + _FACTOR * self._of_momenta, planned)
        # with these factors, equal numbers of all replicas add up to 0
        last = dist.get_world_size(self._replicas) - 1
        return total * (-last if dist.get_rank(self._replicas) == last else 1)

    def _look_ahead(
        self, numbers: Sequence[int], groups: Sequence[ParamGroup], state: State
    ) -> dict[int, Tensor]:
        """Return the directions of some shards; note fingerprints of momenta if they count."""
        rule, wanted = self.rule, set(numbers)
        items = {n: i for n, i in rule.with_grads(groups, state).items() if n in wanted}
        params = [item.param for item in items.values()]
        if rule.host is not None:
            rule.host.fetch(params, state)
        found, momenta = rule.look_ahead(items, {})
        if rule.host is not None:
            rule.host.write_back(params, state)
            rule.host.wait_for_write_back()
        for at, matrix in enumerate(self._matrices[n] for n in self._drawn):
            if self._replicas is not None and matrix.shard in momenta:
                for piece, row in matrix.pieces(momenta[matrix.shard], self._ranks.rank):
                    self._of_momenta[at] += fingerprint(piece, row)
        exchange = rule.exchange
        return {n: exchange.input_of(n, found).to(exchange.dtype) for n in numbers}

    def forget(self) -> None:
        """Drop what was computed for a step."""
        for exchange in self.rule.exchanges:
            exchange.skipped, exchange.insert_checked = (), None
        self.rule.squares.clear()  # left of matrices that were skipped
        self._drawn, self._updates = (), {}
        self._seen = self._of_momenta = torch.empty(0)

    def _insert(self, updates: Mapping[int, Tensor]) -> None:
        """Write the matrices that were computed before the step over a wave's."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for matrix in (self._matrices[n] for n in self._drawn):
            if matrix.shard in self._updates and matrix.shard in updates:
                both = (updates[matrix.shard], self._updates[matrix.shard])
                its = (matrix.pieces(tensor, self._ranks.rank) for tensor in both)
                pairs += [(out, block) for (out, _), (block, _) in zip(*its, strict=True)]
        if pairs:
            outs, blocks = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(outs, blocks)

    def _compute(self, planned: _Planned, groups: Sequence[ParamGroup], state: State) -> None:
        """Compute matrices on some ranks of the group; collective.

        This rank's part of fingerprints is int64 ``(kinds, matrices)``, of which all kinds must be
        equal. Updates are those of this rank's shards.
        """
        matrices = [self._matrices[n] for n in planned.numbers]
        kinds = max(map(len, planned.ranks)) + 1
        seen = torch.zeros(kinds, len(matrices), dtype=torch.int64, device=self._device)
        updates: dict[int, Tensor] = {}
        number_of = {shard.name: number for number, shard in enumerate(self.rule.shards)}

        def load(_: int, names: Sequence[str]) -> dict[str, Tensor]:
            directions = self._look_ahead([number_of[n] for n in names], groups, state)
            return {name: directions[number_of[name]] for name in names}

        def compute(batch: WaveBatch) -> None:
            start, ranks = batch.matrices[0], planned.ranks[batch.matrices[0]]
            # the rule reads the current one
            exchange = self.rule.exchange = self.rule.exchanges[matrices[start].exchange]
            indices = [matrices[at].index for at in batch.matrices]
            exchange.compute_alone(batch.tensor, indices)
            row = 0 if exchange.blockwise else ranks.index(self._ranks.rank)
            # the last rank stands in for those that others matrices have
            last = row + 1 if row + 1 < len(ranks) else kinds - 1
            seen[row:last, start : start + len(indices)] = fingerprint(batch.tensor)

        def store(results: Mapping[str, Tensor]) -> None:
            updates.update({number_of[name]: result for name, result in results.items()})

        # a matrix that the step computes again must not count twice
        stats, self.rule.stats = self.rule.stats, None
        with matmul_precision():
            planned.redistribution.run(load, compute, store)
        self.rule.stats = stats
        planned.redistribution.buffers.clear()
        seen[:-1] *= planned.copies
        for row, places, views in planned.arriving:
            pieces = [_view(updates[shard], view) for shard, view in views]
            stack = torch.stack(pieces) if len(pieces) > 1 else pieces[0].unsqueeze(0)
            seen[-1].index_add_(0, places, fingerprint(stack, row))
        self._seen, self._updates = seen, updates

    def _gathered(self) -> list[list[tuple[int, ...]]]:
        """Return, for each drawn matrix, fingerprints that must be equal; collective.

        They are those of either rank and of what arrived, or those of each replica.
        """
        seen = self._seen
        if self._replicas is None:
            dist.all_reduce(seen, group=self._ranks.group)
            return [[(value,) for value in column] for column in seen.T.tolist()]
        seen = torch.cat([self._of_momenta.unsqueeze(0), seen])
        if self._ranks.group is not None:
            dist.all_reduce(seen, group=self._ranks.group)
        found = seen.new_empty(dist.get_world_size(self._replicas) * seen.numel())
        dist.all_gather_into_tensor(found, seen.view(-1), group=self._replicas)
        by_matrix = found.view(-1, *seen.shape).permute(2, 0, 1).tolist()
        return [[tuple(of_rank) for of_rank in of_matrix] for of_matrix in by_matrix]

    def _new_plan(self, stacks: Sequence[_Stack]) -> _Planned:
        exchange = self.rule.exchange
        members = [
            (number, kind, stack.ranks)
            for kind, stack in enumerate(stacks)
            for number in stack.matrices
        ]
        matrices = [self._matrices[number] for number, *_ in members]
        planned = [
            Matrix(
                m.name,
                m.layout,
                m.layout.compact()
                if exchange.blockwise
                else Layout.replicated(m.layout.shape, computing),
                self.rule.shards[m.shard].name,
                kind=kind,
            )
            for m, (_, kind, computing) in zip(matrices, members, strict=True)
        ]
        shapes = [self._matrices[stack.matrices[0]].layout.shape for stack in stacks]
        costs = [
            len(stack.matrices) * standard_flops(*shape)
            for stack, shape in zip(stacks, shapes, strict=True)
        ]
        waves = plan_waves(
            [stack.ranks[0] for stack in stacks],
            costs,
            list(map(self._size, stacks)),
            max_bytes=_WAVE * exchange.wave_elements,
        )
        places: dict[int, list[int]] = defaultdict(list)
        for at, (_, kind, _) in enumerate(members):
            places[kind].append(at)
        copies = [max(m.copies, 1) for m in matrices]
        weights = [_weight(m.name) for m in matrices]
        return _Planned(
            tuple(number for number, *_ in members),
            tuple(computing for *_, computing in members),
            Redistribution(
                planned,
                [[at for kind in wave for at in places[kind]] for wave in waves],
                self._ranks.group,
                dtype=exchange.dtype,
                device=self._device,
                name="spot checks",
            ),
            torch.tensor(copies, dtype=torch.int64, device=self._device),
            torch.tensor(weights, dtype=torch.int64, device=self._device),
            self._arriving(matrices),
        )

    def _arriving(
        self, matrices: Sequence[_Drawn]
    ) -> list[tuple[int, Tensor, list[tuple[int, _ViewT]]]]:
        alike: dict[tuple[int, int, int], list[tuple[int, int, _ViewT]]] = defaultdict(list)
        for at, matrix in enumerate(matrices):
            for row, view, is_source in matrix.views(self._ranks.rank):
                if matrix.copies or is_source:
                    alike[row, *view[0]].append((at, matrix.shard, view))
        found = []
        for (row, height, width), pieces in alike.items():
            most = max(1, self.rule.exchange.wave_elements // (height * width))
            for part in batched(pieces, most):
                places = torch.tensor([at for at, *_ in part], device=self._device)
                found.append((row, places, [(shard, view) for _, shard, view in part]))
        return found

    def findings(self, step: int) -> list[str]:
        """Return a sentence for each matrix whose fingerprints differ; collective."""
        if not self._drawn:
            return []
        found = []
        for number, its in zip(self._drawn, self._gathered(), strict=True):
            if len(set(its)) > 1:
                matrix, shard = (
                    self._matrices[number],
                    self.rule.shards[self._matrices[number].shard],
                )
                name = matrix.name.replace(shard.name, shard.global_name, 1)
                found.append(f"spot check: step {step}, {name}: {self._what_differs(number, its)}")
        return found

    def _what_differs(self, number: int, its: list[tuple[int, ...]]) -> str:
        if self._replicas is not None:
            (usual, votes), *_ = Counter(its).most_common()
            odd = [rank for rank, values in enumerate(its) if values != usual]
            if 2 * votes > len(its):
                return f"{self._named(odd)} has other updates or momenta than most ranks"
            return f"{self._named(range(len(its)))} have different updates or momenta"
        if its[0] != its[1]:
            pair = next(stack.ranks for stack in self._stacks if number in stack.matrices)
            return f"{self._named(pair)} computed different updates"
        return "an update was changed on its way to the ranks that store it"

    def _named(self, ranks: Iterable[int]) -> str:
        voters = self._voters
        assert voters is not None
        return " and ".join(
            f"rank {dist.get_global_rank(voters, rank)} ({self._hosts[rank][0]})" for rank in ranks
        )


class SpotChecks:
    """Checks all update rules of an optimizer, and stops all ranks if updates differ.

    Args:
        parts: Each update rule, and its replicas, if any.
        fraction: Share of matrices that are checked in a step.
    """

    def __init__(self, parts: Sequence[PartT], fraction: float) -> None:
        self._checks: list[tuple[SpotCheck, AssignedRule]] = []
        unchecked = []
        served = []
        for item, replicas in parts:
            rule = item.rule
            if replicas is not None and dist.get_world_size(replicas) == 1:
                replicas = None
            why = _why_unchecked(rule, replicas)
            if why:
                unchecked.append(f"{rule.name} {why}")
            elif isinstance(rule, MuonRule):
                served.append((rule, item, replicas))
        for rule, item, replicas in served:
            check = SpotCheck(rule, replicas)
            self._checks.append((check, item))
            if check.odd:
                unchecked.append(f"{rule.name} for {check.odd} matrices: no two devices are equal")
        self.cycle = math.ceil(1 / fraction)
        wanted = max((check.wanted_turns for check, _ in self._checks), default=1)
        self._turns = min(self.cycle, max(gather_objects(wanted)))
        for check, _ in self._checks:
            check.deal(self._turns)
        for line in gather_unique(unchecked):
            inform(logger, f"muon_check_fraction={fraction} does not check all: {line}")

    def due(self, step: int) -> AbstractContextManager[None] | None:
        """Return what checks a step, which then runs in its block; None if none is checked."""
        turn = self._turn(step)
        return None if turn is None else self._checked(step, turn)

    @contextmanager
    def _checked(self, step: int, turn: int) -> Iterator[None]:
        """Check some matrices before a block, which uses their updates; collective over all ranks.

        Raises:
            SpotCheckError: On all ranks, if updates differ; nothing has changed.
        """
        try:
            total = torch.zeros((), dtype=torch.int64, device=device_of_collectives())
            for check, item in self._checks:
                with item.groups_and_state() as (groups, state):
                    total += check.run(turn, groups, state)
            if dist.is_initialized():
                dist.all_reduce(total)
            if total.item() != 0:
                found = [text for check, _ in self._checks for text in check.findings(step)]
                text = "; ".join(gather_unique(found))
                raise SpotCheckError(f"{text}. No weight or optimizer state has changed")
            yield
        finally:
            for check, _ in self._checks:
                check.forget()

    @property
    def steps(self) -> list[int]:
        """The steps of the first cycle in which matrices are checked."""
        return [step for step in range(self.cycle) if self._turn(step) is not None]

    def _turn(self, step: int) -> int | None:
        """Return whose turn it is; None if no matrix is checked in a step."""
        before, now = ((phase * self._turns) // self.cycle for phase in (step, step + 1))
        return before % self._turns if now != before else None


def _total(fingerprints: Tensor, planned: _Planned) -> Tensor:
    """Return a sum of fingerprints ``(matrices,)`` that changes if one of them does."""
    return (fingerprints * planned.weights).sum()


def _why_unchecked(rule: UpdateRule, replicas: dist.ProcessGroup | None) -> str:
    """Return why an update rule cannot be checked; empty if it can, or has no matrices."""
    if not rule.schedules:
        return ""
    if not isinstance(rule, MuonRule) or type(rule)._update is not MuonRule._update:
        return "computes updates that depend on more than a direction"
    if replicas is not None:
        return ""
    if rule.exchange.ranks.size == 1:
        return "runs on one rank, and a check needs a second one"
    return "computes pieces in blockwise mode" if rule.exchange.blockwise else ""


def _copies_of(layout: Layout) -> int:
    """Return how often each element is stored; 0 if some are stored more often than others."""
    boxes, (rows, cols) = layout.boxes, layout.shape
    copies = int(boxes.area.sum()) // max(1, rows * cols)
    of_all = weights_of(np.zeros(2, np.int64), np.array([rows, cols]))
    return copies if boxes.weights.sum() == of_all * np.uint64(copies) else 0
