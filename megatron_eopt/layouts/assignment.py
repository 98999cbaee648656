"""Which rank computes on which matrix: balanced first, near its storage second."""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts.boxes import Int64Array

__all__ = ["assign_owners", "iteration_cost", "lower_bound"]

type Float64Array = npt.NDArray[np.float64]

# Above this multiple of the lower bound the first assignment is tried again by bin packing.
_GOOD_ENOUGH = 1.01
_PACKING_ROUNDS = 20
# Packing looks at every rank for every distinct cost; this many costs at most, over all rounds.
_PACKING_COSTS = 200_000
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
    costs: Sequence[float] | Float64Array,
    world_size: int,
    *,
    home: Sequence[int] | Int64Array | None = None,
    share: Sequence[float] | Float64Array | None = None,
) -> Int64Array:
    """Give every matrix an owner such that the largest sum of costs is small.

    Longest processing time first; where that misses the lower bound, bin packing with a search for
    the smallest bin (Coffman, Garey and Johnson 1978, "multifit"). Then owners are exchanged
    among matrices of equal cost, and matrices moved as far as the maximum allows, so that they lie
    where most of them is stored. Deterministic and pure: every rank computes the same.

    Args:
        costs: Estimated cost of every matrix, not negative, in any unit.
        world_size: Number of ranks.
        home: The rank that stores most of each matrix, -1 for none.
        share: How much a rank saves if a matrix stays at home, in any unit (for instance elements
            stored there); decides who stays. All equal by default.

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
    order = np.argsort(-cost, kind="stable")
    owners = _longest_first(cost, order, world_size)
    bound = lower_bound(cost, world_size)
    makespan = _loads(owners, cost, world_size).max()
    if makespan > _GOOD_ENOUGH * bound:
        owners = _multifit(cost, order, world_size, owners, bound, makespan)
    if home is not None:
        weight = np.ones(len(cost)) if share is None else np.asarray(share, np.float64)
        _settle(owners, cost, np.asarray(home, np.int64), weight, world_size)
    return owners


def _loads(owners: Int64Array, cost: Float64Array, world_size: int) -> Float64Array:
    return np.bincount(owners, weights=cost, minlength=world_size)


def _longest_first(cost: Float64Array, order: Int64Array, world_size: int) -> Int64Array:
    """Give the next largest matrix to the least loaded rank, the lowest one on ties."""
    heap = [(0.0, rank) for rank in range(world_size)]
    owners = np.empty(len(cost), np.int64)
    for i, amount in zip(order.tolist(), cost[order].tolist(), strict=True):
        load, rank = heap[0]
        owners[i] = rank
        heapq.heapreplace(heap, (load + amount, rank))
    return owners


def _multifit(
    cost: Float64Array,
    order: Int64Array,
    world_size: int,
    owners: Int64Array,
    low: float,
    high: float,
) -> Int64Array:
    """Search the smallest capacity for which first-fit decreasing succeeds."""
    rounds = _PACKING_COSTS // len(np.unique(cost))
    for _ in range(min(rounds, _PACKING_ROUNDS)):
        if high <= _GOOD_ENOUGH * low:
            break
        capacity = (low + high) / 2
        packed = _first_fit(cost, order, world_size, capacity)
        if packed is None:
            low = capacity
        else:
            owners, high = packed, float(_loads(packed, cost, world_size).max())
    return owners


def _first_fit(
    cost: Float64Array, order: Int64Array, world_size: int, capacity: float
) -> Int64Array | None:
    """Fill ranks in order, larger matrices first; None if one does not fit anywhere.

    Matrices of equal cost are placed together: models have thousands of them in few sizes.
    """
    room = np.full(world_size, capacity * (1 + 1e-12))
    owners = np.empty(len(cost), np.int64)
    sizes, first = np.unique(-cost[order], return_index=True)
    ends = np.append(first[1:], len(order))
    for size, begin, end in zip((-sizes).tolist(), first.tolist(), ends.tolist(), strict=True):
        count = end - begin
        fits = np.full(world_size, count) if size == 0 else np.minimum(room // size, count)
        until = np.minimum(np.cumsum(fits), count).astype(np.int64)
        if until[-1] < count:
            return None
        taken = np.diff(until, prepend=0)
        owners[order[begin:end]] = np.repeat(np.arange(world_size), taken)
        room -= taken * size
    return owners


def _settle(
    owners: Int64Array, cost: Float64Array, home: Int64Array, share: Float64Array, world_size: int
) -> None:
    """Bring matrices home in place, without raising the maximum."""
    _exchange_equals(owners, cost, home, share, world_size)
    load = _loads(owners, cost, world_size)
    limit = load.max()
    moved = True
    while moved:  # a matrix that moves home makes room where it was; each moves at most once
        moved = False
        away = np.flatnonzero((owners != home) & (home >= 0))
        fits = load[home[away]] + cost[away] <= limit
        away = away[fits]
        for i in away[np.lexsort((away, -share[away]))].tolist():
            if load[home[i]] + cost[i] <= limit:
                load[owners[i]] -= cost[i]
                load[home[i]] += cost[i]
                owners[i] = home[i]
                moved = True


def _exchange_equals(
    owners: Int64Array, cost: Float64Array, home: Int64Array, share: Float64Array, world_size: int
) -> None:
    """Among matrices of equal cost, deal the same owners out again, first to those at home."""
    _, kind = np.unique(cost, return_inverse=True)
    key, places = np.unique(kind * world_size + owners, return_counts=True)
    claim = np.where(home >= 0, kind * world_size + home, -1)
    slot = np.minimum(np.searchsorted(key, claim), max(len(key) - 1, 0))
    # order the claims on each slot by share, and grant as many as it has places
    by_slot = np.lexsort((np.arange(len(cost)), -share, slot, key[slot] != claim))
    ordered = slot[by_slot]
    valid = key[ordered] == claim[by_slot]
    first = np.searchsorted(ordered[valid], ordered[valid], "left")
    granted = by_slot[valid][np.arange(len(first)) - first < places[ordered[valid]]]
    np.subtract.at(places, slot[granted], 1)
    rest = np.setdiff1d(np.arange(len(cost)), granted)
    rest = rest[np.argsort(kind[rest], kind="stable")]
    owners[granted] = home[granted]
    owners[rest] = np.repeat(key, places) % world_size
