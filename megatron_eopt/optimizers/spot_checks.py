"""Spot checks: a few matrices are computed by a second rank too, before a step changes anything.

Note [Spot checks]
    Each matrix has one owner, so a wrong product or message reaches all replicas alike, and
    comparing replicas does not find it. But any rank computes any matrix to the same bits. In
    ``1 / fraction`` steps each matrix is checked once, most often all in the same step. Before that
    step, their directions go to their owner and to a second rank, and both compute the updates.
    Three fingerprints must agree: that of either result, and that of what arrives where the
    parameter is stored. The step then uses these updates, and its waves do not compute them again.

    Calls are few: the differences of all fingerprints, each times an odd number, are summed over
    all ranks, and any sum but 0 is an alarm. Equal matrices of an owner are computed in one stack,
    and whoever computes one of them again computes that stack, because batched products may round
    otherwise.

    If fingerprints differ, a third rank computes the stack and decides. In a group of two, both
    compute again. If nothing is decided, the step is left out.

    Where every data-parallel rank computes all updates, nothing is computed twice: the ranks
    compare theirs, and most of them decide. There a flipped gradient or momentum shows as well.

    What is seen: flips in products, in the memory of the ranks that compute, and in messages. What
    is not seen: flips before gradients are reduced, or in the only copy of a gradient, a momentum
    or a weight.
"""

import hashlib
import logging
import math
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import batched
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base import gpu
from megatron_eopt.base.agreement import (
    device_of_collectives,
    gather_objects,
    gather_unique,
    is_rank_0,
)
from megatron_eopt.base.errors import SpotCheckError
from megatron_eopt.base.gpu import HostCopy
from megatron_eopt.base.log import inform
from megatron_eopt.base.names import CheckActionT
from megatron_eopt.config.settings import RunSettings
from megatron_eopt.layouts import Layout, Matrix, Redistribution, WaveBatch
from megatron_eopt.layouts.assignment import plan_waves
from megatron_eopt.layouts.boxes import Boxes
from megatron_eopt.layouts.plan import sum_of_weights
from megatron_eopt.math import standard_flops
from megatron_eopt.math.precision import matmul_precision
from megatron_eopt.optimizers.adaptive_rule import AdaMuonRule
from megatron_eopt.optimizers.muon_rule import Held, MuonRule
from megatron_eopt.optimizers.update_rule import ParamGroup, State, UpdateRule

logger = logging.getLogger(__name__)

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_PURE = (MuonRule._update, AdaMuonRule._update)
"""Updates that depend on the direction alone."""

_FACTOR = 0x1E3779B97F4A7C15
"""An odd factor on one of two differences, so that they do not add up to 0."""

_WAVE = 4
"""An owner's part of a wave is so many times as large as in a step, so that there are few calls."""

_TURN = 16
"""A step checks no more than this many waves of what a rank stores, because it keeps all until the
next one; what remains is checked in other steps."""

type _ViewT = tuple[tuple[int, int], tuple[int, int], int]
"""Sizes, strides and offset of a part of a flat tensor."""

type SourceT = Callable[[], AbstractContextManager[tuple[list[ParamGroup], State]]]
"""Provides the groups and the state that an update rule works on."""


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
class Finding:
    """One matrix whose fingerprints differed."""

    matrix: str
    step: int
    rank: int | None  # the rank that was wrong; None for a message, or if nothing was decided
    where: str  # its host and device
    decided: bool

    def __str__(self) -> str:
        """Return the line for the log."""
        start = f"spot check: step {self.step}, {self.matrix}: "
        if not self.decided and self.rank is None:
            return start + "ranks computed different updates, and none could be confirmed"
        if not self.decided:
            return start + f"rank {self.rank} ({self.where}) has other gradients or momenta"
        if self.rank is None:
            return start + "an update was changed on its way to the ranks that store it"
        return start + f"rank {self.rank} ({self.where}) computed other bits than two other times"


@dataclass(frozen=True)
class _Drawn:
    """A matrix that can be drawn."""

    shard: int  # index of its shard
    layout: Layout
    name: str  # unique
    engine: int  # index of the engine that computes it
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
        self._ranks, self._device = update_rule.engine.ranks, update_rule.engine.device
        place_of = {
            name: (number, index)
            for number, engine in enumerate(update_rule.engines)
            for index, name in enumerate(engine.names)
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
        self._plans: dict[tuple[Any, ...], _Planned] = {}
        # of the last step, until the next one: matrices that were checked, directions of their
        # shards, and updates, of which only their pieces count
        self._drawn: tuple[int, ...] = ()
        self._directions: dict[int, Tensor] = {}
        self._updates: dict[int, Tensor] = {}
        # this rank's part of the fingerprints
        self._seen = self._of_momenta = torch.empty(0)

    def _stacked(self) -> list[_Stack]:
        alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for number, matrix in enumerate(self._matrices):
            if self._comparable[number]:
                transposed = self.rule.engines[matrix.engine].transposed[matrix.index]
                ranks: tuple[int, ...] = (matrix.first,)
                if self._replicas is None:
                    ranks += tuple(self._alike(ranks)[:1])
                alike[ranks, matrix.engine, transposed, matrix.layout.shape].append(number)
        stacks = []
        for (ranks, engine, _, shape), members in alike.items():
            most = self.rule.engines[engine].most_in_stack(shape)
            stacks += [_Stack(part, ranks) for part in batched(members, most)]
        return stacks

    @property
    def wanted_turns(self) -> int:
        """In how many steps to check all matrices, so that each keeps a limited amount."""
        held = sum(
            (self._matrices[n].layout.boxes.held(self._ranks.size) for n in self._drawable_numbers),
            np.zeros(self._ranks.size, np.int64),
        )
        return max(1, math.ceil(held.max() / (_TURN * self.rule.engine.wave_elements)))

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
        """Return a rank that computes each matrix, of layout, engine and index there.

        Of several, it is the one that is least busy, as is the rank after it.
        """
        size, firsts = self._ranks.size, [0] * len(places)
        busy = [0.0] * size
        costs = [standard_flops(*layout.shape) for layout, *_ in places]
        for at in sorted(range(len(places)), key=lambda at: (-costs[at], at)):
            _, engine, index = places[at]
            computing = self.rule.engines[engine].work.matrices[index].compute.boxes.rank
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
    def run(self, turn: int, groups: Sequence[ParamGroup], state: State) -> list[Tensor]:
        """Compute the matrices of a turn; collective; nothing changes.

        Returns:
            A tensor of two numbers, int64, whose sums over all ranks are 0 unless updates differ,
            or momenta; nothing if this update rule has no matrices in this turn.
        """
        self.forget()
        if not self._turns[turn]:
            return []
        planned = self._plan(self._turns[turn], [self._stacks[n].ranks for n in self._turns[turn]])
        self._drawn = planned.numbers
        self._of_momenta = torch.zeros_like(planned.weights)
        self._seen, self._updates = self._compute(
            planned, lambda numbers: self._look_ahead(numbers, groups, state)
        )
        self.rule.insert_checked = self._insert
        for number, engine in enumerate(self.rule.engines):
            mine = (m for m in (self._matrices[n] for n in self._drawn) if m.engine == number)
            # statistics look at what the waves compute
            engine.skipped = () if self.rule.is_measured else {m.index for m in mine}
        if self._replicas is None:
            first, second, arrived = self._seen
            differences = first - arrived + _FACTOR * (second - arrived)
            of_updates = _total(differences, planned)
            return [torch.stack([of_updates, torch.zeros_like(of_updates)])]
        computed, arrived = self._seen
        both = _total(computed + 3 * arrived, planned), _total(self._of_momenta, planned)
        # with these factors, equal numbers of all replicas add up to 0
        last = dist.get_world_size(self._replicas) - 1
        return [torch.stack(both) * (-last if dist.get_rank(self._replicas) == last else 1)]

    def _look_ahead(
        self, numbers: Sequence[int], groups: Sequence[ParamGroup], state: State
    ) -> None:
        """Compute the directions of some shards, and fingerprints of momenta if they count."""
        directions, momenta = self.rule.look_ahead(numbers, groups, state)
        self._directions |= directions
        for at, matrix in enumerate(self._matrices[n] for n in self._drawn):
            if self._replicas is not None and matrix.shard in momenta:
                for piece, row in matrix.pieces(momenta[matrix.shard], self._ranks.rank):
                    self._of_momenta[at] += fingerprint(piece, row)

    def forget(self) -> None:
        """Drop what was computed for the last step."""
        self.rule.insert_checked, self.rule.held = None, None
        for engine in self.rule.engines:
            engine.skipped = ()
        self._drawn, self._directions, self._updates = (), {}, {}
        self._seen = self._of_momenta = torch.empty(0)

    def hold(self, passed: Tensor) -> None:
        """Let the step write drawn weights only if ``passed``, of shape (), is not NaN."""
        drawn = Counter(self._matrices[number].shard for number in self._drawn)
        whole = {
            n: u for n, u in self._updates.items() if drawn[n] == len(self.rule.shards[n].layouts)
        }
        self.rule.held = Held(frozenset(drawn), passed, updates=whole)

    def _insert(self, updates: Mapping[int, Tensor]) -> None:
        self._copy(self._drawn, self._updates, updates)

    def _copy(
        self, numbers: Iterable[int], source: Mapping[int, Tensor], sink: Mapping[int, Tensor]
    ) -> None:
        """Copy matrices between tensors of the shards that both have."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for matrix in (self._matrices[n] for n in numbers):
            if matrix.shard in source and matrix.shard in sink:
                its = (matrix.pieces(t[matrix.shard], self._ranks.rank) for t in (sink, source))
                pairs += [(mine, other) for (mine, *_), (other, *_) in zip(*its, strict=True)]
        if pairs:
            outs, blocks = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(outs, blocks)

    def _compute(
        self, planned: _Planned, look_ahead: Callable[[Sequence[int]], None] | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute matrices on some ranks of the group; collective.

        Returns:
            This rank's part of fingerprints, int64 ``(kinds, matrices)``, of which all kinds must
            be equal; and the updates of this rank's shards.
        """
        matrices = [self._matrices[n] for n in planned.numbers]
        kinds = max(map(len, planned.ranks)) + 1
        seen = torch.zeros(kinds, len(matrices), dtype=torch.int64, device=self._device)
        updates: dict[int, Tensor] = {}
        number_of = {shard.name: number for number, shard in enumerate(self.rule.shards)}

        def load(_: int, names: Sequence[str]) -> dict[str, Tensor]:
            if look_ahead is not None:
                look_ahead([number_of[name] for name in names])
            return {name: self._directions[number_of[name]] for name in names}

        def compute(batch: WaveBatch) -> None:
            start, ranks = batch.matrices[0], planned.ranks[batch.matrices[0]]
            engine = self.rule.engines[matrices[start].engine]
            indices = [matrices[at].index for at in batch.matrices]
            self.rule.compute_alone(engine, batch.tensor, indices)
            row = 0 if engine.blockwise else ranks.index(self._ranks.rank)
            # the last rank stands in for those that others matrices have
            last = row + 1 if row + 1 < len(ranks) else kinds - 1
            seen[row:last, start : start + len(indices)] = fingerprint(batch.tensor)

        def store(results: Mapping[str, Tensor]) -> None:
            updates.update({number_of[name]: result for name, result in results.items()})

        with matmul_precision():
            planned.redistribution.run(load, compute, store)
        planned.redistribution.buffers.clear()
        seen[:-1] *= planned.copies
        for row, places, views in planned.arriving:
            pieces = [_view(updates[shard], view) for shard, view in views]
            stack = torch.stack(pieces) if len(pieces) > 1 else pieces[0].unsqueeze(0)
            seen[-1].index_add_(0, places, fingerprint(stack, row))
        return seen, updates

    def _gathered(self, of_momenta: Tensor, seen: Tensor) -> Tensor:
        """Return fingerprints ``(n, kinds, matrices)``, of which all ``n`` must be equal.

        They are summed over the group; with replicas, the first kind is that of momenta.
        """
        if self._replicas is None:
            dist.all_reduce(seen, group=self._ranks.group)
            return seen.unsqueeze(1)
        seen = torch.cat([of_momenta.unsqueeze(0), seen])
        if self._ranks.group is not None:
            dist.all_reduce(seen, group=self._ranks.group)
        replicas = dist.get_world_size(self._replicas)
        found = seen.new_empty(replicas * seen.numel())
        dist.all_gather_into_tensor(found, seen.view(-1), group=self._replicas)
        return found.view(replicas, *seen.shape)

    def _plan(self, stacks: Sequence[int], ranks: Sequence[tuple[int, ...]]) -> _Planned:
        """Return how ranks compute some stacks; collective."""
        key = (tuple(stacks), tuple(ranks))
        if key not in self._plans:
            self._plans[key] = self._new_plan([self._stacks[n] for n in stacks], ranks)
        return self._plans[key]

    def _new_plan(self, stacks: Sequence[_Stack], ranks: Sequence[tuple[int, ...]]) -> _Planned:
        engine = self.rule.engine
        members = [
            (number, kind, computing)
            for kind, (stack, computing) in enumerate(zip(stacks, ranks, strict=True))
            for number in stack.matrices
        ]
        matrices = [self._matrices[number] for number, *_ in members]
        planned = [
            Matrix(
                m.name,
                m.layout,
                m.layout.compact()
                if engine.blockwise
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
            [computing[0] for computing in ranks],
            costs,
            list(map(self._size, stacks)),
            max_bytes=_WAVE * engine.wave_elements,
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
                dtype=engine.dtype,
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
            most = max(1, self.rule.engine.wave_elements // (height * width))
            for part in batched(pieces, most):
                places = torch.tensor([at for at, *_ in part], device=self._device)
                found.append((row, places, [(shard, view) for _, shard, view in part]))
        return found

    @torch.no_grad()
    def settle(self, step: int, groups: Sequence[ParamGroup], state: State) -> list[Finding]:
        """Find the right updates where fingerprints differ, and use them; collective."""
        if not self._drawn:
            return []
        values = self._gathered(self._of_momenta, self._seen)
        differ = (values != values[:1]).any(0).any(0)
        wrong = [n for n, is_wrong in zip(self._drawn, differ.tolist(), strict=True) if is_wrong]
        if not wrong:
            return []
        before = {n: values[..., self._drawn.index(n)].tolist() for n in wrong}
        # whole stacks, because other ones may round otherwise
        again = [n for n, s in enumerate(self._stacks) if not set(wrong).isdisjoint(s.matrices)]
        if self._replicas is None:
            return self._ask_others(step, again, before)
        return self._ask_replicas(step, again, before, groups, state)

    def _ask_others(
        self, step: int, stacks: list[int], before: Mapping[int, list[list[int]]]
    ) -> list[Finding]:
        pairs = [self._stacks[n].ranks for n in stacks]
        planned = self._plan(stacks, [tuple(self._alike(pair)[:1]) or pair for pair in pairs])
        seen, updates = self._compute(planned)
        values = self._gathered(self._of_momenta, seen)
        pair_of = {n: self._stacks[s].ranks for s in stacks for n in self._stacks[s].matrices}
        findings = []
        for number, its in before.items():
            now = {value for (value,) in values[..., planned.numbers.index(number)].tolist()}
            first = [value for (value,) in its]
            decided = len(now) == 1 and not now.isdisjoint(first[:2])
            pair = pair_of[number]
            odd = [rank for rank, value in zip(pair, first, strict=False) if {value} != now]
            if decided:
                self._copy([number], updates, self._updates)
            findings.append(
                self._finding(step, number, odd[0] if decided and odd else None, decided)
            )
        return findings

    def _ask_replicas(
        self,
        step: int,
        stacks: list[int],
        before: Mapping[int, list[list[int]]],
        groups: Sequence[ParamGroup],
        state: State,
    ) -> list[Finding]:
        assert self._replicas is not None
        # a transient error is gone when all compute again
        planned = self._plan(stacks, [self._stacks[n].ranks for n in stacks])
        seen, updates = self._compute(planned)
        mine = [self._drawn.index(number) for number in planned.numbers]
        values = self._gathered(self._of_momenta[mine], seen)
        stepped = {number: param for _, param, number in self.rule.numbered(groups)}
        findings = []
        for number, its_before in before.items():
            at = planned.numbers.index(number)
            first, now = (tuple(map(tuple, its)) for its in (its_before, values[..., at].tolist()))
            agreed, votes = Counter(now).most_common(1)[0]
            odd = [rank for rank, its in enumerate(first) if its != agreed]
            known = 2 * votes > len(now)
            # with another gradient, the norm and so all other updates differ, too
            decided = known and all(its[0] == agreed[0] for its in first)
            if known:
                source = dist.get_global_rank(self._replicas, now.index(agreed))
                shard = self._matrices[number].shard
                if decided and shard in updates:
                    dist.broadcast(updates[shard], source, group=self._replicas)
                    self._copy([number], updates, self._updates)
                elif shard in stepped:
                    self._restore(stepped[shard], state, source)
            findings.append(self._finding(step, number, odd[0] if known and odd else None, decided))
        return findings

    def _restore(self, param: Tensor, state: State, source: int) -> None:
        """Copy a parameter's state from a replica that has the right one."""
        for _, value in sorted(state[param].items()):
            if isinstance(value, Tensor) and value.dim():
                dist.broadcast(value, source, group=self._replicas)

    def _finding(self, step: int, number: int, rank: int | None, decided: bool) -> Finding:
        matrix, shard = self._matrices[number], self.rule.shards[self._matrices[number].shard]
        name = matrix.name.replace(shard.name, shard.global_name or shard.name, 1)
        if rank is None:
            return Finding(name, step, None, "", decided)
        voters = self._voters
        assert voters is not None
        return Finding(
            name, step, dist.get_global_rank(voters, rank), self._hosts[rank][0], decided
        )


class SpotChecks:
    """Checks all update rules of an optimizer, and acts on what they find.

    Args:
        parts: Each update rule, what provides its groups and state, and its replicas, if any.
        fraction: Share of matrices that are checked in a step.
        action: What to do if fingerprints differ.
    """

    def __init__(
        self,
        parts: Sequence[tuple[UpdateRule, SourceT, dist.ProcessGroup | None]],
        fraction: float,
        action: CheckActionT,
    ) -> None:
        self._action = action
        self._rules = [rule for rule, *_ in parts]
        # for updates and momenta of the last step, 1 if they were right, else 0
        self._unread: tuple[HostCopy, int] | None = None
        self._checks: list[tuple[SpotCheck, SourceT]] = []
        unchecked = []
        served = []
        for rule, source, replicas in parts:
            if replicas is not None and dist.get_world_size(replicas) == 1:
                replicas = None
            why = _why_unchecked(rule, replicas)
            if why:
                unchecked.append(f"{rule.name} {why}")
            elif isinstance(rule, MuonRule):
                served.append((rule, source, replicas))
        for rule, source, replicas in served:
            check = SpotCheck(rule, replicas)
            self._checks.append((check, source))
            if check.odd:
                unchecked.append(f"{rule.name} for {check.odd} matrices: no two devices are equal")
        self.cycle = math.ceil(1 / fraction)
        wanted = max((check.wanted_turns for check, _ in self._checks), default=1)
        self._turns = min(self.cycle, max(gather_objects(wanted)))
        for check, _ in self._checks:
            check.deal(self._turns)
        for line in gather_unique(unchecked):
            inform(logger, f"muon_check_fraction={fraction} does not check all: {line}")

    @classmethod
    def of(
        cls,
        settings: RunSettings,
        parts: Iterable[tuple[UpdateRule, SourceT, dist.ProcessGroup | None]],
    ) -> "SpotChecks | None":
        """Return the checks that the settings ask for; None if they ask for none."""
        fraction, action = settings.config.muon_check_fraction, settings.config.muon_check_action
        return cls(list(parts), fraction, action) if fraction else None

    def passes(self, step: int, *, late: bool = False) -> bool:
        """Check some matrices; return whether to step; collective over all ranks.

        With ``late``, the host does not wait: the step is launched in any case, writes nothing
        that could be wrong, and :meth:`read_late` acts before the next one.

        Raises:
            SpotCheckError: On all ranks, if an update is wrong and the action is "stop".
        """
        turn = self._turn(step)
        if turn is None:
            self.forget()
            return True
        found = []
        for check, source in self._checks:
            with source() as (groups, state):
                found += check.run(turn, groups, state)
        if found:
            sums = torch.stack(found).sum(0)
        else:
            sums = torch.zeros(2, dtype=torch.int64, device=device_of_collectives())
        if dist.is_initialized():
            dist.all_reduce(sums)
        if not late:
            return not sums.any() or self._settle(step)
        right = sums == 0
        # what is wrong with updates can be mended later; another momentum has changed the norm
        holds = self._action == "continue"
        passed = torch.where(right[1] if holds else right.all(), 1.0, torch.nan)
        for rule in self._rules:
            kept = rule.coefficient
            rule.coefficient = passed if kept is None else kept * passed
        if holds:
            for check, _ in self._checks:
                check.hold(torch.where(right.all(), 1.0, torch.nan))
        self._unread = HostCopy(right.float()), step
        return True

    @property
    def steps(self) -> list[int]:
        """The steps of the first cycle in which matrices are checked."""
        return [step for step in range(self.cycle) if self._turn(step) is not None]

    def _turn(self, step: int) -> int | None:
        """Return whose turn it is; None if no matrix is checked in a step."""
        before, now = ((phase * self._turns) // self.cycle for phase in (step, step + 1))
        return before % self._turns if now != before else None

    def read_late(self) -> bool:
        """Act on the check of a step that did not wait for it; return whether it was done.

        Raises:
            SpotCheckError: On all ranks, as in :meth:`passes`.
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return True
        updates, momenta = unread[0].read()
        if updates and momenta:
            return True
        if self._settle(unread[1]):
            for check, _ in self._checks:
                check.rule.apply_held()
        return self._action == "continue" and bool(momenta)

    def forget(self) -> None:
        """Drop what was computed for the last step, and whether it was right."""
        self._unread = None
        for check, _ in self._checks:
            check.forget()

    def _settle(self, step: int) -> bool:
        findings: list[Finding] = []
        for check, source in self._checks:
            with source() as (groups, state):
                findings += check.settle(step, groups, state)
        findings = gather_unique(findings)
        goes_on = self._action == "continue" and all(finding.decided for finding in findings)
        for finding in findings if is_rank_0() else ():
            logger.warning("%s", finding)
        if not goes_on:
            self.forget()
        if self._action == "stop":
            text = "; ".join(map(str, findings))
            raise SpotCheckError(f"{text}. No weight or optimizer state has changed")
        return goes_on


def _total(fingerprints: Tensor, planned: _Planned) -> Tensor:
    """Return a sum of fingerprints ``(matrices,)`` that changes if one of them does."""
    return (fingerprints * planned.weights).sum()


def _why_unchecked(rule: UpdateRule, replicas: dist.ProcessGroup | None) -> str:
    """Return why an update rule cannot be checked; empty if it can, or has no matrices."""
    if not rule.schedules:
        return ""
    if not isinstance(rule, MuonRule) or type(rule)._update not in _PURE:
        return "computes updates that depend on more than a direction"
    if replicas is not None:
        return ""
    if rule.engine.ranks.size == 1:
        return "runs on one rank, and a check needs a second one"
    return "computes pieces in blockwise mode" if rule.engine.blockwise else ""


def _copies_of(layout: Layout) -> int:
    """Return how often each element is stored; 0 if some are stored more often than others."""
    boxes, (rows, cols) = layout.boxes, layout.shape
    copies = int(boxes.area.sum()) // max(1, rows * cols)
    heights = sum_of_weights(boxes.bottom) - sum_of_weights(boxes.row)
    widths = sum_of_weights(boxes.right) - sum_of_weights(boxes.column)
    of_all = sum_of_weights(np.array([rows])) * sum_of_weights(np.array([cols]))
    return copies if (heights * widths).sum() == of_all[0] * np.uint64(copies) else 0
