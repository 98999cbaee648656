"""The ranks that together store whole matrices: tensor parallel x data parallel.

Megatron has such a group for dense parameters and one instance of the distributed optimizer; for
experts whose own tensor parallelism is on, and for several instances, there is none. It is then
created, by all ranks together and in one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import distributed

from megatron_eopt.base.agreement import integers
from megatron_eopt.stores.shard import Ranks


@dataclass(frozen=True)
class Coordinates:
    """The groups that span one redistribution group.

    Attributes:
        tensor: Tensor-parallel group of the parameters; None without one.
        data: Group over which buffers are cut into fragments; None if they are not.
        existing: A group of Megatron's that may already be the right one; None if there is none.
    """

    tensor: Any
    data: Any
    existing: Any = None


@dataclass(frozen=True)
class RankGrid:
    """A group and where each of its members stands.

    Attributes:
        ranks: The group.
        tensor_ranks: Tensor-parallel coordinate of each member, in the group's order.
        data_ranks: Which fragment of a buffer each member holds, in the group's order.
        tensor_size: Ranks of the tensor-parallel group.
    """

    ranks: Ranks
    tensor_ranks: tuple[int, ...]
    data_ranks: tuple[int, ...]
    tensor_size: int


def data_parallel_only(grid: RankGrid, group: Any) -> RankGrid:
    """Return the ranks that hold fragments of one tensor-parallel slab.

    Args:
        grid: The redistribution group that this rank belongs to.
        group: Its data-parallel group.
    """
    size = distributed.get_world_size(group)
    mine = grid.tensor_ranks[grid.ranks.rank]
    return RankGrid(Ranks.of(group), (mine,) * size, tuple(range(size)), grid.tensor_size)


def redistribution_grids(wanted: Sequence[Coordinates]) -> list[RankGrid]:
    """Return one group per entry; all ranks of the world call this with as many entries.

    Args:
        wanted: What spans each group.
    """
    everyone = integers([number for mine in wanted for number in _row(mine)])
    grids = []
    for place, mine in enumerate(wanted):
        # of every rank: first rank of its tensor-parallel group and place there, likewise of data
        table = [row[4 * place : 4 * place + 4] for row in everyone]
        classes = _classes(table)
        grids.append(_describe(table, classes, _find_or_create(mine, classes)))
    return grids


def _row(mine: Coordinates) -> list[int]:
    me = distributed.get_rank()
    row = []
    for group in (mine.tensor, mine.data):
        ranks = [me] if group is None else distributed.get_process_group_ranks(group)
        # fragments are numbered by the rank in the group, whatever its global rank
        row += [min(ranks), ranks.index(me)]
    return row


def _classes(table: Sequence[Sequence[int]]) -> list[list[int]]:
    """Partition the ranks: two belong together if they share one of the groups."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        while parent.setdefault(rank, rank) != rank:
            rank = parent[rank]
        return rank

    for rank, row in enumerate(table):
        for first in (row[0], row[2]):
            low, high = sorted((root(rank), root(first)))
            parent[high] = low
    classes: dict[int, list[int]] = {}
    for rank in range(len(table)):
        classes.setdefault(root(rank), []).append(rank)
    return [classes[key] for key in sorted(classes)]


def _find_or_create(mine: Coordinates, classes: list[list[int]]) -> Any:
    """Return this rank's group: Megatron's where it fits on every rank, else a new one."""
    me = distributed.get_rank()
    members = next(ranks for ranks in classes if me in ranks)
    candidates = [group for group in (mine.data, mine.existing) if group is not None]
    found = next((group for group in candidates if _members(group) == members), None)
    fits = found is not None or len(members) == 1
    if all(row[0] for row in integers([int(fits)])):
        return found
    groups = [distributed.new_group(ranks) for ranks in classes if len(ranks) > 1]
    return next((group for group in groups if _members(group) == members), None)


def _members(group: Any) -> list[int]:
    ranks = distributed.get_process_group_ranks(group)
    return sorted(ranks) if distributed.get_rank() in ranks else []


def _describe(
    table: Sequence[Sequence[int]], classes: Sequence[Sequence[int]], group: Any
) -> RankGrid:
    me = distributed.get_rank()
    members: Sequence[int] = next(ranks for ranks in classes if me in ranks)
    if group is not None:
        members = distributed.get_process_group_ranks(group)
    return RankGrid(
        Ranks.of(group) if len(members) > 1 else Ranks(),
        tensor_ranks=tuple(table[rank][1] for rank in members),
        data_ranks=tuple(table[rank][3] for rank in members),
        tensor_size=max(table[rank][1] for rank in members) + 1,
    )
