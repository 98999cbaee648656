"""The ranks that together store whole matrices: tensor parallel x data parallel.

Megatron has such a group for dense parameters and one instance of the distributed optimizer; for
experts whose own tensor parallelism is on, and for several instances, there is none. It is then
created, by all ranks together and in one order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import distributed

from megatron_eopt.base.agreement import GroupPlace, any_rank, places_in, ranks_of
from megatron_eopt.stores.shard import Ranks


class Coordinates(NamedTuple):
    """The groups, or None, that span one redistribution group.

    Buffers are cut into fragments over ``data``; ``existing`` may already be the right one.
    """

    tensor: Any
    data: Any
    existing: Any = None


class RankGrid(NamedTuple):
    """A group, and the tensor-parallel coordinate and fragment of each member, in its order."""

    ranks: Ranks
    tensor_ranks: tuple[int, ...]
    data_ranks: tuple[int, ...]
    tensor_size: int


def data_parallel_only(grid: RankGrid, group: Any) -> RankGrid:
    """Return the ranks, a data-parallel group, that hold fragments of one tensor-parallel slab."""
    size = distributed.get_world_size(group)
    mine = grid.tensor_ranks[grid.ranks.rank]
    return RankGrid(Ranks.of(group), (mine,) * size, tuple(range(size)), grid.tensor_size)


def redistribution_grids(wanted: Sequence[Coordinates]) -> list[RankGrid]:
    """Return one group per entry; all ranks of the world call this with as many entries."""
    places = places_in([group for mine in wanted for group in (mine.tensor, mine.data)])
    grids = []
    for mine, tensor, data in zip(wanted, places[::2], places[1::2], strict=True):
        group = _find_or_create(mine, _classes(tensor, data))
        members = ranks_of(group)
        # fragments are numbered by the rank in the group, whatever its global rank
        tensor_ranks = tuple(tensor[rank].number for rank in members)
        data_ranks = tuple(data[rank].number for rank in members)
        grids.append(RankGrid(Ranks.of(group), tensor_ranks, data_ranks, max(tensor_ranks) + 1))
    return grids


def _classes(*places: Sequence[GroupPlace]) -> list[list[int]]:
    """Partition the ranks: two belong together if they share one of the groups."""
    class_of = np.arange(len(places[0]))
    for of_all in places:
        for rank, place in enumerate(of_all):
            low, high = sorted((class_of[rank], class_of[place.first]))
            class_of[class_of == high] = low
    return [np.flatnonzero(class_of == number).tolist() for number in np.unique(class_of)]


def _find_or_create(mine: Coordinates, classes: list[list[int]]) -> Any:
    """Return this rank's group: Megatron's where it fits on every rank, else a new one."""
    me = distributed.get_rank()
    members = next(ranks for ranks in classes if me in ranks)
    candidates = [group for group in (mine.data, mine.existing) if group is not None]
    found = next((group for group in candidates if _members(group) == members), None)
    fits = found is not None or len(members) == 1
    if not any_rank(not fits):
        return found
    groups = [distributed.new_group(ranks) for ranks in classes if len(ranks) > 1]
    return next((group for group in groups if _members(group) == members), None)


def _members(group: Any) -> list[int]:
    if group == distributed.GroupMember.NON_GROUP_MEMBER:
        return []
    return sorted(distributed.get_process_group_ranks(group))
