"""Spot checks: a few matrices are computed by a second rank too, before a step changes anything.

Note [Spot checks]
    Each matrix has one owner, so a wrong product or message reaches all replicas alike, and
    comparing replicas does not find it. But any rank computes any matrix to the same bits. In each
    step some matrices are drawn, the same on all ranks; in ``1 / fraction`` steps each is drawn
    once. Before the step, their directions go to their owner and to a second rank. Both compute the
    update, one matrix at a time. Three fingerprints must agree: that of either result, and that of
    what arrives where the parameter is stored. The step then uses these updates, and its waves do
    not compute them again.

    If fingerprints differ, a third rank computes the matrix and decides. In a group of two, both
    compute again. If nothing is decided, the step is left out.

    Where every data-parallel rank computes all updates, nothing is computed twice: the ranks
    compare theirs, and most of them decide. There a flipped gradient or momentum shows as well.

    What is seen: flips in products, in the memory of the ranks that compute, and in messages. What
    is not seen: flips before gradients are reduced, or in the only copy of a gradient, a momentum
    or a weight.
"""

import logging
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base import gpu
from megatron_eopt.base.agreement import gather_objects, gather_unique, is_rank_0
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

_TURNS = 3
"""Most checks of a cycle: the matrices of one share its calls, and keep all ranks busy."""

type SourceT = Callable[[], AbstractContextManager[tuple[list[ParamGroup], State]]]
"""Provides the groups and the state that an update rule works on."""


def fingerprint(matrix: Tensor, first_row: int = 0) -> Tensor:
    """Return a sum of a 2-D tensor's bits, int64 of shape (), that any single flip changes.

    Fingerprints of pieces, modulo 2^64, add up to that of the matrix; row weights are odd.
    """
    rows = matrix.view(_BITS[matrix.dtype.itemsize]).sum(1, dtype=torch.int64)
    numbers = torch.arange(first_row, first_row + len(rows), device=matrix.device)
    return (rows * (2 * numbers + 1)).sum()


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
class Cost:
    """What checks cost a rank, on average over the ranks."""

    flops: float  # of matrix products
    bytes: float  # sent to other ranks
    calls: float  # of collectives


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

    def pieces(self, stored: Tensor, rank: int) -> list[tuple[Tensor, int, bool]]:
        """Return a rank's parts of it: view, first row, and whether it is the source."""
        flat, boxes = stored.view(-1), self.layout.piece(rank)
        table = zip(*(column.tolist() for column in _columns(boxes)), strict=True)
        return [
            (flat.as_strided((h, w), (s, 1), flat.storage_offset() + o), row, bool(source))
            for h, w, s, o, row, source in table
        ]


def _columns(boxes: Boxes) -> tuple[Any, ...]:
    return boxes.height, boxes.width, boxes.stride, boxes.offset, boxes.row, boxes.source


class SpotCheck:
    """Checks the matrices of one update rule; see Note [Spot checks].

    All ranks of its group create it together. Its matrices are dealt into ``turns``. ``replicas``
    are ranks that store and compute the same as this one.
    """

    def __init__(
        self,
        update_rule: MuonRule,
        turns: int,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.rule, self._replicas = update_rule, replicas
        self._ranks, self._device = update_rule.engine.ranks, update_rule.engine.device
        place_of = {
            name: (number, index)
            for number, engine in enumerate(update_rule.engines)
            for index, name in enumerate(engine.names)
        }
        self._matrices = [
            self._drawable(number, layout, name, *place_of[name])
            for number, shard in enumerate(update_rule.shards)
            for layout, name in zip(shard.layouts, shard.matrix_names, strict=True)
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
        shapes = {n: m.layout.shape for n, m in enumerate(self._matrices) if self._comparable[n]}
        self._turns = _turns(shapes, turns)
        self._plans: dict[tuple[tuple[int, ...], ...], Redistribution] = {}
        self._drawn: tuple[int, ...] = ()
        self._directions: dict[int, Tensor] = {}
        self._momenta: dict[int, Tensor] = {}  # only if replicas compare them
        self._updates: dict[int, Tensor] = {}  # checked updates by shard; only drawn pieces count
        self._values = torch.empty(0)

    @property
    def odd(self) -> int:
        """How many matrices are not checked, because no rank has an equal device."""
        return self._comparable.count(False)

    @property
    def _voters(self) -> dist.ProcessGroup | None:
        """The ranks whose results are compared."""
        return self._ranks.group if self._replicas is None else self._replicas

    def _drawable(self, shard: int, layout: Layout, name: str, engine: int, index: int) -> _Drawn:
        work = self.rule.engines[engine].work.matrices[index]
        computing = np.unique(work.compute.boxes.rank)
        first = int(computing[index % len(computing)])
        return _Drawn(shard, layout, name, engine, index, _copies_of(layout), first)

    def _pair(self, number: int) -> tuple[int, ...]:
        """Return the ranks of the group that compute a matrix before the step."""
        matrix = self._matrices[number]
        if self._replicas is not None:
            return (matrix.first,)
        held = matrix.layout.boxes.held(self._ranks.size).tolist()
        others = self._alike(number, (matrix.first,))
        return matrix.first, max(others, key=lambda rank: held[rank])

    def _alike(self, number: int, but: Sequence[int]) -> list[int]:
        """Return other ranks of the group with equal devices, in turn."""
        size, start = self._ranks.size, number + but[0] + 1
        others = [rank for at in range(size) if (rank := (start + at) % size) not in but]
        kind = self._hosts[but[0]][1]
        return [rank for rank in others if self._hosts[rank][1] == kind]

    @torch.no_grad()
    def run(self, turn: int, groups: Sequence[ParamGroup], state: State) -> Tensor | None:
        """Compute the drawn matrices; return whether any is wrong, bool of shape (); collective.

        Returns None if no matrix of this update rule is drawn. Nothing changes.
        """
        self.forget()
        self._drawn = self._turns[turn]
        if not self._drawn:
            return None
        numbers = list(dict.fromkeys(self._matrices[n].shard for n in self._drawn))
        self._directions, momenta = self.rule.look_ahead(numbers, groups, state)
        self._momenta = {} if self._replicas is None else momenta
        self._values, self._updates = self._compute(self._drawn, map(self._pair, self._drawn))
        self.rule.insert_checked = self._insert
        for number, engine in enumerate(self.rule.engines):
            mine = (m for m in (self._matrices[n] for n in self._drawn) if m.engine == number)
            # statistics look at what the waves compute
            engine.skipped = () if self.rule.is_measured else {m.index for m in mine}
        return self._differ.any()

    @property
    def _differ(self) -> Tensor:
        """Whether fingerprints differ, bool ``(drawn,)``."""
        return (self._values != self._values[:1]).any(0).any(0)

    def forget(self) -> None:
        """Drop what was computed for the last step."""
        self.rule.insert_checked, self.rule.held = None, None
        for engine in self.rule.engines:
            engine.skipped = ()
        self._drawn, self._directions, self._momenta, self._updates = (), {}, {}, {}

    def cost(self) -> Cost:
        """Return the cost of checking each matrix once."""
        size, kinds = self._ranks.size, 2 if self._replicas is None else 1
        sent, calls, flops = 0, 0, 0.0
        for turn in filter(None, self._turns):
            travelling = [0, 0]  # elements to ranks that compute, and back
            pairs = [self._pair(number) for number in turn]
            for number, pair in zip(turn, pairs, strict=True):
                matrix = self._matrices[number]
                held, whole = matrix.layout.boxes.held(size), math.prod(matrix.layout.shape)
                flops += (kinds - 1) * standard_flops(*matrix.layout.shape)
                if not self.rule.engine.blockwise:
                    travelling[0] += sum(max(0, whole - int(held[rank])) for rank in pair)
                    travelling[1] += int(held.sum() - held[list(pair)].sum())
            waves = len(self._waves(turn, pairs))
            reductions = 1 + (self._replicas is not None and self._ranks.group is not None)
            calls += waves * sum(map(bool, travelling)) + reductions
            sent += sum(travelling)
        itemsize = self.rule.engine.dtype.itemsize
        return Cost(flops / size, sent * itemsize / size, calls)

    def hold(self, passed: Tensor) -> None:
        """Let the step write drawn weights only if ``passed``, of shape (), is not NaN."""
        shards = frozenset(self._matrices[number].shard for number in self._drawn)
        self.rule.held = Held(shards, passed)

    def release(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Drop the same if the step is left out."""
        if self.rule.host is not None:
            numbers = set(self._directions)
            held = [p for _, p, number in self.rule.numbered(groups) if number in numbers]
            self.rule.host.write_back(held, state)
            self.rule.host.settle()
        self.forget()

    def _insert(self, updates: Mapping[int, Tensor]) -> None:
        for number in self._drawn:
            if self._matrices[number].shard in updates:
                self._copy(number, self._updates, updates)

    def _copy(self, number: int, source: Mapping[int, Tensor], sink: Mapping[int, Tensor]) -> None:
        matrix = self._matrices[number]
        if matrix.shard in source:
            pair = (matrix.pieces(its[matrix.shard], self._ranks.rank) for its in (source, sink))
            for (checked, *_), (other, *_) in zip(*pair, strict=True):
                other.copy_(checked)

    def _compute(
        self, drawn: Sequence[int], computing: Iterable[tuple[int, ...]]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute matrices on some ranks of the group; collective.

        Returns:
            Fingerprints, int64 ``(n, kinds, drawn)``, of which all ``n`` must be equal; and the
            updates of this rank's shards.
        """
        matrices, ranks = [self._matrices[n] for n in drawn], list(computing)
        redistribution = self._redistribution(drawn, ranks)
        seen = torch.zeros(
            max(map(len, ranks)) + 1, len(matrices), dtype=torch.int64, device=self._device
        )
        updates: dict[int, Tensor] = {}
        shards = self.rule.shards
        me = self._ranks.rank

        def load(_: int, names: Sequence[str]) -> dict[str, Tensor]:
            of_name = {shards[number].name: d for number, d in self._directions.items()}
            return {name: of_name[name] for name in names}

        def compute(batch: WaveBatch) -> None:
            (at,) = batch.matrices
            engine = self.rule.engines[matrices[at].engine]
            self.rule.compute_alone(engine, batch.tensor, matrices[at].index)
            row = 0 if engine.blockwise else ranks[at].index(me)
            seen[row, at] = fingerprint(batch.tensor[0]) * max(matrices[at].copies, 1)

        def store(results: Mapping[str, Tensor]) -> None:
            found = {
                n: results[shards[n].name] for n in self._directions if shards[n].name in results
            }
            updates.update(found)
            for at, matrix in enumerate(matrices):
                if matrix.shard in found:
                    for piece, row, is_source in matrix.pieces(found[matrix.shard], me):
                        if matrix.copies or is_source:
                            seen[-1, at] += fingerprint(piece, row)

        with matmul_precision():
            redistribution.run(load, compute, store)
        return self._gathered(drawn, seen), updates

    def _gathered(self, drawn: Sequence[int], seen: Tensor) -> Tensor:
        """Sum fingerprints over the group; collect those of replicas, with their momenta's."""
        if self._replicas is None:
            dist.all_reduce(seen, group=self._ranks.group)
            return seen.unsqueeze(1)
        of_momenta = torch.zeros_like(seen[:1])
        for at, matrix in enumerate(self._matrices[n] for n in drawn):
            if matrix.shard in self._momenta:
                pieces = matrix.pieces(self._momenta[matrix.shard], self._ranks.rank)
                for piece, row, _ in pieces:
                    of_momenta[0, at] += fingerprint(piece, row)
        seen = torch.cat([of_momenta, seen])
        if self._ranks.group is not None:
            dist.all_reduce(seen, group=self._ranks.group)
        replicas = dist.get_world_size(self._replicas)
        found = seen.new_empty(replicas * seen.numel())
        dist.all_gather_into_tensor(found, seen.view(-1), group=self._replicas)
        return found.view(replicas, *seen.shape)

    def _redistribution(
        self, drawn: Sequence[int], ranks: Sequence[tuple[int, ...]]
    ) -> Redistribution:
        key = (tuple(drawn), *ranks)
        if key not in self._plans:
            matrices = [self._matrices[n] for n in drawn]
            blockwise = self.rule.engine.blockwise
            planned = [
                Matrix(
                    m.name,
                    m.layout,
                    m.layout.compact()
                    if blockwise
                    else Layout.replicated(m.layout.shape, computing),
                    self.rule.shards[m.shard].name,
                    kind=at,  # each is computed alone, so that bits do not depend on others
                )
                for at, (m, computing) in enumerate(zip(matrices, ranks, strict=True))
            ]
            engine = self.rule.engine
            self._plans[key] = Redistribution(
                planned,
                self._waves(drawn, ranks),
                self._ranks.group,
                dtype=engine.dtype,
                device=self._device,
                name="spot checks",
            )
            self._plans[key].buffers = engine.redistribution.buffers
        return self._plans[key]

    def _waves(self, drawn: Sequence[int], ranks: Sequence[tuple[int, ...]]) -> list[list[int]]:
        shapes = [self._matrices[number].layout.shape for number in drawn]
        costs, sizes = [standard_flops(*s) for s in shapes], [math.prod(s) for s in shapes]
        return plan_waves(ranks, costs, sizes, max_bytes=self.rule.engine.wave_elements)

    @torch.no_grad()
    def settle(self, step: int, groups: Sequence[ParamGroup], state: State) -> list[Finding]:
        """Find the right updates where fingerprints differ, and use them; collective."""
        if not self._drawn:
            return []
        wrong = [
            n for n, is_wrong in zip(self._drawn, self._differ.tolist(), strict=True) if is_wrong
        ]
        if not wrong:
            return []
        before = {n: self._values[..., self._drawn.index(n)].tolist() for n in wrong}
        if self._replicas is None:
            return self._ask_others(step, wrong, before)
        return self._ask_replicas(step, wrong, before, groups, state)

    def _ask_others(
        self, step: int, wrong: list[int], before: Mapping[int, list[list[int]]]
    ) -> list[Finding]:
        pairs = [self._pair(n) for n in wrong]
        thirds = [
            tuple(self._alike(n, pair)[:1]) or pair for n, pair in zip(wrong, pairs, strict=True)
        ]
        values, updates = self._compute(wrong, thirds)
        findings = []
        for at, (number, pair) in enumerate(zip(wrong, pairs, strict=True)):
            now = {value for (value,) in values[..., at].tolist()}
            first = [value for (value,) in before[number]]
            decided = len(now) == 1 and not now.isdisjoint(first[:2])
            odd = [rank for rank, value in zip(pair, first, strict=False) if {value} != now]
            if decided:
                self._copy(number, updates, self._updates)
            findings.append(
                self._finding(step, number, odd[0] if decided and odd else None, decided)
            )
        return findings

    def _ask_replicas(
        self,
        step: int,
        wrong: list[int],
        before: Mapping[int, list[list[int]]],
        groups: Sequence[ParamGroup],
        state: State,
    ) -> list[Finding]:
        assert self._replicas is not None
        # a transient error is gone when all compute again
        values, updates = self._compute(wrong, map(self._pair, wrong))
        stepped = {number: param for _, param, number in self.rule.numbered(groups)}
        findings = []
        for at, number in enumerate(wrong):
            first, now = (
                tuple(map(tuple, its)) for its in (before[number], values[..., at].tolist())
            )
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
                    self._copy(number, updates, self._updates)
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
        self._unread: tuple[HostCopy, int] | None = None  # whether the last step was right: 1 or 0
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
        self._cycle = math.ceil(1 / fraction)
        self._turns = min(self._cycle, _TURNS)
        for rule, source, replicas in served:
            check = SpotCheck(rule, self._turns, replicas)
            self._checks.append((check, source))
            if check.odd:
                unchecked.append(f"{rule.name} for {check.odd} matrices: no two devices are equal")
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
                wrong = check.run(turn, groups, state)
            found += [] if wrong is None else [wrong]
        flag = torch.stack(found).any().float() if found else torch.zeros((), device="cuda")
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        if not late:
            return not bool(flag) or self._settle(step)
        passed = torch.where(flag > 0, torch.nan, 1.0)
        if self._action == "continue":
            for check, _ in self._checks:
                check.hold(passed)
        else:
            for rule in self._rules:
                kept = rule.coefficient
                rule.coefficient = passed if kept is None else kept * passed
        self._unread = HostCopy(1 - flag), step
        return True

    def _turn(self, step: int) -> int | None:
        """Return whose turn it is; None if no matrix is checked in a step."""
        before, now = ((phase * self._turns) // self._cycle for phase in (step - 1, step))
        return now % self._turns if now != before else None

    def read_late(self) -> bool:
        """Act on the check of a step that did not wait for it; return whether it was done.

        Raises:
            SpotCheckError: On all ranks, as in :meth:`passes`.
        """
        unread, self._unread = self._unread, None
        if unread is None or unread[0].read():
            return True
        if self._settle(unread[1]):
            for check, _ in self._checks:
                check.rule.apply_held()
        return self._action == "continue"

    def cost(self) -> "Cost":
        """Return what checks cost this rank in a step, on average over ranks and steps."""
        found = [check.cost() for check, _ in self._checks]
        calls = self._turns * bool(found) + sum(cost.calls for cost in found)
        sums = (sum(cost.flops for cost in found), sum(cost.bytes for cost in found), calls)
        return Cost(*(amount / self._cycle for amount in sums))

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
            for check, source in self._checks:
                with source() as (groups, state):
                    check.release(groups, state)
        if self._action == "stop":
            text = "; ".join(map(str, findings))
            raise SpotCheckError(f"{text}. No weight or optimizer state has changed")
        return goes_on


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


def _turns(shapes: Mapping[int, tuple[int, int]], count: int) -> list[tuple[int, ...]]:
    """Deal matrices into turns with about equal work."""
    order = sorted(shapes, key=lambda n: (-math.prod(shapes[n]), n))
    return [tuple(sorted(order[turn::count])) for turn in range(count)]


def _copies_of(layout: Layout) -> int:
    """Return how often each element is stored; 0 if some are stored more often than others."""
    boxes, (rows, cols) = layout.boxes, layout.shape
    copies = int(boxes.area.sum()) // max(1, rows * cols)
    heights = sum_of_weights(boxes.bottom) - sum_of_weights(boxes.row)
    widths = sum_of_weights(boxes.right) - sum_of_weights(boxes.column)
    of_all = sum_of_weights(np.array([rows])) * sum_of_weights(np.array([cols]))
    return copies if (heights * widths).sum() == of_all[0] * np.uint64(copies) else 0
