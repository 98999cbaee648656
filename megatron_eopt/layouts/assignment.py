"""Which rank computes on which matrix: balanced first, near its storage second."""

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts.boxes import Int64Array

type Float64Array = npt.NDArray[np.float64]

_BOUND_ROUNDS = 30


def iteration_cost(rows: int, cols: int, steps: int = 5) -> float:
    """Multiply-adds (times two) of a Newton-Schulz iteration on one matrix.

    With m the short and n the long side a step has two products of m x n x m and one of m x m x m:
    ``steps * (4 n m^2 + 2 m^3)``.
    """
    short, long = sorted((rows, cols))
    return float(steps) * (4.0 * long * short**2 + 2.0 * short**3)


def lower_bound(costs: Sequence[float] | Float64Array, world_size: int) -> float:
    """What no assignment of whole matrices can beat.

    The maximum of the mean load, the largest cost, the packing bound for equal units (of the ``j *
    world_size + 1`` largest matrices one rank gets ``j + 1``, which cost at least as much as the
    smallest of them), and the largest load for which the bin packing bound L2 of Martello and
    Toth (1990) still proves that ``world_size`` ranks are too few.
    """
    ordered = np.sort(np.asarray(costs, np.float64))[::-1]
    if not ordered.any():
        return 0.0
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    j = np.arange((len(ordered) - 1) // world_size + 1)
    packing = total[j * world_size + 1] - total[j * world_size - j]
    low = float(max(total[-1] / world_size, packing.max()))
    high = 2.0 * low
    for _ in range(_BOUND_ROUNDS):
        load = (low + high) / 2
        if _ranks_needed(ordered, total, load) > world_size:
            low = load
        else:
            high = load
    return low


def _ranks_needed(ordered: Float64Array, total: Float64Array, load: float) -> int:
    """Count ranks that a load limit surely needs, for every threshold of what is small.

    Matrices above half the limit need a rank each; those so large that nothing above the threshold
    fits beside them leave no room for the middle ones, which must fit into the others' room.
    """
    ascending = -ordered
    half = int(np.searchsorted(ascending, -load / 2, "left"))
    small = np.unique(ordered[half:])
    if not len(small):
        return half
    alone = np.searchsorted(ascending, small - load, "left")
    until = np.searchsorted(ascending, -small, "right")
    room = (half - alone) * load - (total[half] - total[alone])
    more = np.ceil((total[until] - total[half] - room) / load - 1e-9)
    return half + int(max(more.max(), 0))


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

    Raises:
        ConfigurationError: If a cost is negative or not finite, or there is no rank.
    """
    cost = np.asarray(costs, np.float64)
    if world_size < 1:
        raise ConfigurationError("world_size", world_size, "must be at least 1", "Give a group")
    if len(cost) and not (np.isfinite(cost).all() and cost.min() >= 0):
        bad = cost[~(np.isfinite(cost) & (cost >= 0))][0]
        raise ConfigurationError("costs", bad, "must be finite and not negative", "Mend the model")
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
