"""More ranks than work: which matrices several ranks compute together, and which ranks.

A team is a block of consecutive ranks of a group, ``[a k, (a + 1) k)`` for a power of two ``k``, so
that its members are near each other. Each computes a slab of the long side and the same number of
rows of every small product, see Note [Teams] of :mod:`megatron_eopt.math.newton_schulz`.

Note [What a team costs]
    Of a matrix with sides m <= n a member of k computes ``1 / k``, calls :data:`CALLS` collectives,
    and moves :data:`MOVED` small matrices of m x m, of which it has ``1 / k`` itself. Both are
    counted in the operations that a rank could do meanwhile.
"""

from collections.abc import Sequence

import numpy as np

from megatron_eopt.layouts import assign_owners
from megatron_eopt.layouts.assignment import Float64Array
from megatron_eopt.layouts.boxes import Int64Array
from megatron_eopt.math import standard_flops

COLLECTIVE = 1e9
"""What a rank could compute in the time of one collective: FLOPs of a GPU in microseconds, and of a
CPU that talks over loopback."""

BYTE = 2e3
"""What a rank could compute while a byte travels: 6e14 a second on 3e11 bytes a second."""

CALLS = 11
"""Collectives of five steps: a sum of norms, and one sum and one gathering a step or, in Gram's
form, three sums and seven gatherings."""

MOVED = 10
"""Small matrices that these sum or gather."""

_WORTHWHILE = 0.9
"""Share of the busiest rank's time from which on teams are left alone, since they need groups."""

type Team = tuple[int, ...]


def assign_teams(
    shapes: Sequence[tuple[int, int]],
    world_size: int,
    largest: int,
    element_size: int,
    homes: Int64Array,
) -> list[Team] | None:
    """Return who computes each matrix, if that is faster than whole matrices at owners.

    A target for the busiest rank decides the size of every team, the smallest that meets it; then
    the longest work goes to the least busy block. Of all targets the best outcome is taken.

    Args:
        shapes: Of the matrices.
        world_size: Ranks of the group.
        largest: Most ranks of a team: those of one computer.
        element_size: Bytes of an element of small matrices.
        homes: Which rank stores most of each matrix; of blocks that are equally busy one in the
            same computer takes it, and the nearest.

    Returns:
        The ranks of each matrix, the same on every rank: a pure function. None for whole matrices.
    """
    sizes = [size for size in (1 << np.arange(12)).tolist() if size <= min(largest, world_size)]
    if len(sizes) < 2 or not shapes:
        return None
    kinds, kind_of = np.unique(np.sort(shapes, axis=1), axis=0, return_inverse=True)
    table = np.array([[_cost(m, n, size, element_size) for size in sizes] for m, n in kinds])
    costs = table[kind_of.ravel()]
    owners = assign_owners(costs[:, 0], world_size)
    alone = np.bincount(owners, weights=costs[:, 0], minlength=world_size).max()
    mean = costs[:, 0].sum() / world_size
    best, teams = float(_WORTHWHILE * alone), None
    # below that matrices would be cut where nobody waits for them
    for target in np.unique(table[(table >= mean / 4) & (table < best)]):
        chosen = np.where((costs <= target).any(1), (costs <= target).argmax(1), costs.argmin(1))
        busiest, found = _assign(costs, chosen, sizes, world_size, homes, largest)
        if busiest < best:
            best, teams = busiest, found
    return teams


def _cost(m: int, n: int, size: int, element_size: int) -> float:
    alone = standard_flops(int(m), int(n))
    if size == 1:
        return alone
    if m % size or n % size:
        return np.inf
    moved = MOVED * int(m) ** 2 * element_size * (size - 1) / size
    return alone / size + COLLECTIVE * CALLS + BYTE * moved


def _assign(
    costs: Float64Array,
    chosen: Int64Array,
    sizes: Sequence[int],
    world_size: int,
    homes: Int64Array,
    computer: int,
) -> tuple[float, list[Team]]:
    """Return the busiest rank's time, and the teams."""
    loads = np.zeros(world_size)
    teams: list[Team] = [()] * len(costs)
    own = costs[np.arange(len(costs)), chosen]
    for i in np.argsort(-own, kind="stable").tolist():
        size = sizes[chosen[i]]
        whole = world_size // size * size
        blocks = loads[:whole].reshape(-1, size).max(1)
        free = size * np.flatnonzero(blocks == blocks.min())
        far = world_size * (free // computer != homes[i] // computer)
        first = int(free[(np.abs(free - homes[i] // size * size) + far).argmin()])
        loads[first : first + size] = loads[first : first + size].max() + own[i]
        teams[i] = tuple(range(first, first + size))
    return float(loads.max()), teams
