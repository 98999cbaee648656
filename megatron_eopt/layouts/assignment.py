"""Assign matrices to owner ranks and to waves: balanced first, close to their storage second."""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from megatron_eopt.base.names import Int64Array

type Float64Array = npt.NDArray[np.float64]


def assign_owners(
    costs: Sequence[float] | Float64Array,  # of every matrix, in any unit
    world_size: int,  # number of ranks
    *,
    home: Sequence[int] | Int64Array | None = None,  # rank that stores most of each; -1: none
    share: Sequence[float] | Float64Array | None = None,  # gain if a matrix stays at home
    busy: Float64Array | None = None,  # previous load of each rank, in the unit of costs
) -> Int64Array:
    """Choose an owner rank for every matrix so that the largest load is small.

    Longest processing time first, which is at most 4/3 of the optimum (Graham 1969) and near it for
    the shapes of published models. Then owners are exchanged among matrices of equal cost, and
    matrices are moved as far as the largest load allows, to the ranks that store most of them.
    Deterministic and pure: every rank computes the same result.

    Returns:
        The owner of every matrix, int64 ``(len(costs),)``.
    """
    cost = np.asarray(costs, np.float64)
    before = np.zeros(world_size) if busy is None else busy
    owners = _longest_first(cost, before)
    if home is None:
        return owners
    home = np.asarray(home, np.int64)
    weight = np.ones(len(cost)) if share is None else np.asarray(share, np.float64)
    # first what changes no load, then moves that the busiest rank does not notice
    _exchange_equals(owners, cost, home, weight)
    load = before + np.bincount(owners, weights=cost, minlength=world_size)
    # all ranks wait for the busiest one, so loads up to its own are free
    limit = load.max()
    moved = True
    while moved:  # a move makes room for others on the old rank; each matrix moves at most once
        moved = False
        away = np.flatnonzero((owners != home) & (home >= 0))
        away = away[load[home[away]] + cost[away] <= limit]
        # the largest gain first, as later moves find less room
        for i in away[np.argsort(-weight[away], kind="stable")].tolist():
            if load[home[i]] + cost[i] <= limit:
                load[owners[i]] -= cost[i]
                load[home[i]] += cost[i]
                owners[i] = home[i]
                moved = True
    return owners


def _longest_first(cost: Float64Array, busy: Float64Array) -> Int64Array:
    """Give the next most expensive matrix to the least loaded rank, on ties to the lowest one."""
    # numpy's default sort uses the processor's vector instructions, so ties could be ordered
    # differently on ranks with another processor; a stable sort orders them by index
    order = np.argsort(-cost, kind="stable")
    heap = [(load, rank) for rank, load in enumerate(busy.tolist())]
    heapq.heapify(heap)
    owners = np.empty(len(cost), np.int64)
    for i, amount in zip(order.tolist(), cost[order].tolist(), strict=True):
        load, rank = heap[0]
        owners[i] = rank
        heapq.heapreplace(heap, (load + amount, rank))
    return owners


def _exchange_equals(
    owners: Int64Array, cost: Float64Array, home: Int64Array, share: Float64Array
) -> None:
    """Permute owners among matrices of equal cost so that more matrices are at home."""
    _, kind = np.unique(cost, return_inverse=True)
    # How many matrices of each cost an owner has. These numbers stay, and so do all loads.
    places = Counter(zip(kind.tolist(), owners.tolist(), strict=True))
    homes = list(zip(kind.tolist(), home.tolist(), strict=True))
    rest = []
    for i in np.argsort(-share, kind="stable").tolist():
        if places[homes[i]]:
            places[homes[i]] -= 1
            owners[i] = home[i]
        else:
            rest.append(i)
    # both lists are in the order of costs, so each matrix gets an owner that is left for its cost
    rest.sort(key=lambda i: (homes[i][0], i))
    owners[rest] = [owner for _, owner in sorted(places.elements())]


@dataclass
class _Queue:
    """The work of one rank, wave after wave."""

    bytes: int = 0  # of all its matrices
    cost: float = 0.0  # of all its matrices
    wave: int = 0  # the latest one
    held: int = 0  # bytes in the latest wave
    done: float = 0.0  # cost of the matrices that are already in waves

    def due(self, cost: float, size: int, wanted: int, max_bytes: int) -> int:
        """Return the wave for the next matrix that keeps the rank's progress even."""
        # Where the matrix is in the rank's work, from 0 to 1. Equal fractions of all ranks meet in
        # one wave, or the ranks with less work would wait for the others in each.
        middle = (self.done + cost / 2) / self.cost if self.cost else 0.0
        due = max(self.wave, min(int(middle * wanted), wanted - 1))
        # an empty wave takes a matrix of any size, since a single one may exceed the limit
        full = self.held and self.held + size > max_bytes
        # A queue remembers the bytes of its latest wave only, so matrices never go to earlier ones.
        # The number of waves may exceed `wanted`.
        return due + 1 if due == self.wave and full else due

    def assign(self, cost: float, size: int, wave: int) -> None:
        """Put the next matrix into a wave."""
        self.wave, self.held = wave, size + (self.held if wave == self.wave else 0)
        self.done += cost


def plan_waves(
    # owner of every matrix, or the ranks that share it; any constant if all ranks compute all
    owners: Sequence[int | Sequence[int]] | Int64Array,
    costs: Sequence[float],  # estimated cost of every matrix
    sizes: Sequence[int],  # bytes of every matrix
    *,
    max_bytes: int,  # limit per owner and wave; a single matrix may exceed it
    at_least: int = 1,  # minimum number of waves, to overlap communication with computation
) -> list[list[int]]:
    """Partition matrices into waves in which every owner does about the same share of its work.

    Returns:
        Indices of matrices, wave by wave, matrices of equal cost side by side. No wave is empty.
        The result is the same on every rank.
    """
    teams = [list(owner) if isinstance(owner, Sequence) else [int(owner)] for owner in owners]
    queues: dict[int, _Queue] = {rank: _Queue() for team in teams for rank in team}
    for i, team in enumerate(teams):
        for rank in team:
            queues[rank].bytes += sizes[i]
            queues[rank].cost += costs[i]
    fullest = max((queue.bytes for queue in queues.values()), default=0)
    # the fullest owner needs the most waves, and the others spread their work over as many
    wanted = max(at_least, -(-fullest // max_bytes))
    numbers = [0] * len(sizes)
    # in the order of costs, so that matrices of one shape come together and form few batches
    for i in sorted(range(len(sizes)), key=lambda i: (-costs[i], i)):
        team_queues = [queues[rank] for rank in teams[i]]
        # ranks that share a matrix compute it in the same wave: the latest that suits one of them
        numbers[i] = max(queue.due(costs[i], sizes[i], wanted, max_bytes) for queue in team_queues)
        for queue in team_queues:
            queue.assign(costs[i], sizes[i], numbers[i])
    order = sorted(range(len(sizes)), key=lambda i: (numbers[i], -costs[i], i))
    return [list(wave) for _, wave in groupby(order, key=numbers.__getitem__)]


def first_uses[T](waves: Iterable[Iterable[T]]) -> list[list[T]]:
    """Return, for each wave, the items that no earlier wave has."""
    seen: set[T] = set()
    fresh = []
    for items in waves:
        fresh.append([item for item in dict.fromkeys(items) if item not in seen])
        seen.update(fresh[-1])
    return fresh
