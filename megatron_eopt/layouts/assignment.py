"""Which rank computes on which matrix: balanced first, near its storage second."""

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_eopt.layouts.boxes import Int64Array

type Float64Array = npt.NDArray[np.float64]


def iteration_cost(rows: int, cols: int, steps: int = 5) -> float:
    """Multiply-adds (times two) of a Newton-Schulz iteration on one matrix.

    With m the short and n the long side a step has two products of m x n x m and one of m x m x m:
    ``steps * (4 n m^2 + 2 m^3)``.
    """
    short, long = sorted((rows, cols))
    return float(steps) * (4.0 * long * short**2 + 2.0 * short**3)


def assign_owners(
    costs: Sequence[float] | Float64Array,  # of every matrix, in any unit
    world_size: int,  # number of ranks
    *,
    home: Sequence[int] | Int64Array | None = None,  # which rank stores most of it; -1: none
    share: Sequence[float] | Float64Array | None = None,  # what is saved if it stays at home
) -> Int64Array:
    """Give every matrix an owner such that the largest sum of costs is small.

    Longest processing time first, which is at most 4/3 of the optimum (Graham 1969) and near it for
    the shapes of published models. Then owners are exchanged among matrices of equal cost, and
    matrices moved as far as the maximum allows, so that they lie where most of them is stored.
    Deterministic and pure: every rank computes the same.

    Returns:
        The owner of every matrix; int64 ``(len(costs),)``.
    """
    cost = np.asarray(costs, np.float64)
    owners = _longest_first(cost, world_size)
    if home is None:
        return owners
    home = np.asarray(home, np.int64)
    weight = np.ones(len(cost)) if share is None else np.asarray(share, np.float64)
    _exchange_equals(owners, cost, home, weight)
    load = np.bincount(owners, weights=cost, minlength=world_size)
    limit = load.max()
    moved = True
    while moved:  # a matrix that moves home makes room where it was; each moves at most once
        moved = False
        away = np.flatnonzero((owners != home) & (home >= 0))
        away = away[load[home[away]] + cost[away] <= limit]
        for i in away[np.argsort(-weight[away], kind="stable")].tolist():
            if load[home[i]] + cost[i] <= limit:
                load[owners[i]] -= cost[i]
                load[home[i]] += cost[i]
                owners[i] = home[i]
                moved = True
    return owners


def _longest_first(cost: Float64Array, world_size: int) -> Int64Array:
    """Give the next largest matrix to the least loaded rank, the lowest one on ties."""
    order = np.argsort(-cost, kind="stable")
    heap = [(0.0, rank) for rank in range(world_size)]
    owners = np.empty(len(cost), np.int64)
    for i, amount in zip(order.tolist(), cost[order].tolist(), strict=True):
        load, rank = heap[0]
        owners[i] = rank
        heapq.heapreplace(heap, (load + amount, rank))
    return owners


def _exchange_equals(
    owners: Int64Array, cost: Float64Array, home: Int64Array, share: Float64Array
) -> None:
    """Among matrices of equal cost, deal the same owners out again, first to those at home."""
    _, kind = np.unique(cost, return_inverse=True)
    places = Counter(zip(kind.tolist(), owners.tolist(), strict=True))
    homes = list(zip(kind.tolist(), home.tolist(), strict=True))
    rest = []
    for i in np.argsort(-share, kind="stable").tolist():
        if places[homes[i]]:
            places[homes[i]] -= 1
            owners[i] = home[i]
        else:
            rest.append(i)
    rest.sort(key=lambda i: (homes[i][0], i))
    owners[rest] = [owner for _, owner in sorted(places.elements())]
