"""Assigns teams of ranks to matrices, for groups that have more ranks than work.

A team is a block of consecutive ranks of a group, ``[a k, (a + 1) k)`` for a power of two ``k``, so
that its members are close to each other. Each computes a slab of the long side and an equal part of
the rows of every small product; see Note [Teams] of :mod:`megatron_eopt.math.newton_schulz`.

Note [What a team costs]
    For a matrix with sides m <= n, each of k members computes ``1 / k`` of the FLOPs, calls
    :data:`CALLS` collectives, and transfers :data:`MOVED` m x m matrices, of which it already has
    ``1 / k``. Communication is converted to the FLOPs that take the same time.
"""

from collections.abc import Sequence

import numpy as np

from megatron_eopt.base.names import Int64Array
from megatron_eopt.layouts import assign_owners
from megatron_eopt.layouts.assignment import Float64Array
from megatron_eopt.math import standard_flops

COLLECTIVE = 1e9
"""FLOPs that take as long as one collective, on a GPU or on a CPU over loopback."""

BYTE = 2e3
"""FLOPs that take as long as sending a byte: 6e14 FLOP/s over 3e11 bytes/s."""

CALLS = 11
"""Collectives of five steps: one sum of norms, then one sum and one gather per step or, in Gram
form, three sums and seven gathers in all."""

MOVED = 10
"""Small matrices that these collectives sum or gather."""

_WORTHWHILE = 0.9
"""Teams must cut the busiest rank's time below this fraction, because they need process groups."""

type MatrixGroup = tuple[int, ...] | range
"""The ranks that share a matrix: each computes a slab of it."""


def assign_teams(
    shapes: Sequence[tuple[int, int]],
    world_size: int,
    largest: int,
    element_size: int,
    homes: Int64Array,
) -> list[MatrixGroup] | None:
    """Return the ranks that compute each matrix, if teams are faster than single owners.

    For a target time of the busiest rank, every matrix gets the smallest team that meets it, and
    the longest work goes to the least busy block. The best result over all targets is returned.

    Args:
        shapes: Shape of each matrix.
        world_size: Number of ranks in the group.
        largest: Most ranks in a team: those of one computer.
        element_size: Bytes per element of small matrices.
        homes: The rank that stores most of each matrix. Among equally busy blocks, the matrix goes
            to the nearest one, in the same computer if possible.

    Returns:
        The ranks of each matrix (a pure function, the same on every rank), or None for no teams.
    """
    sizes = [size for size in (1 << np.arange(12)).tolist() if size <= min(largest, world_size)]
    if len(sizes) < 2 or not shapes:
        return None
    # a model has few shapes, so costs are computed for these only
    kinds, kind_of = np.unique(np.sort(shapes, axis=1), axis=0, return_inverse=True)
    table = np.array([[_cost(m, n, size, element_size) for size in sizes] for m, n in kinds])
    costs = table[kind_of.ravel()]
    # what the busiest rank needs without teams, which is to be improved
    owners = assign_owners(costs[:, 0], world_size)
    alone = np.bincount(owners, weights=costs[:, 0], minlength=world_size).max()
    mean = costs[:, 0].sum() / world_size
    best, teams = float(_WORTHWHILE * alone), None
    # lower targets would split matrices for which no rank waits
    for target in np.unique(table[(table >= mean / 4) & (table < best)]):
        chosen = np.where((costs <= target).any(1), (costs <= target).argmax(1), costs.argmin(1))
        busiest, assigned = _assign(costs, chosen, sizes, world_size, homes, largest)
        if busiest < best:
            best, teams = busiest, assigned
    return teams


def _cost(m: int, n: int, size: int, element_size: int) -> float:
    alone = standard_flops(int(m), int(n))
    if size == 1:
        return alone
    # `all_gather_into_tensor` and stacks need equal slabs
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
) -> tuple[float, list[MatrixGroup]]:
    """Return the busiest rank's time, and the team of each matrix."""
    loads = np.zeros(world_size)
    teams: list[MatrixGroup] = [()] * len(costs)
    own = costs[np.arange(len(costs)), chosen]
    for i in np.argsort(-own, kind="stable").tolist():
        size = sizes[chosen[i]]
        whole = world_size // size * size
        # members compute in step, so a block begins when its busiest rank is free
        blocks = loads[:whole].reshape(-1, size).max(1)
        free = size * np.flatnonzero(blocks == blocks.min())
        # another computer counts as farther than any rank of this one
        far = world_size * (free // computer != homes[i] // computer)
        first = int(free[(np.abs(free - homes[i] // size * size) + far).argmin()])
        loads[first : first + size] = loads[first : first + size].max() + own[i]
        teams[i] = tuple(range(first, first + size))
    return float(loads.max()), teams
