"""The ranks that together store whole matrices: tensor parallel x data parallel.

Megatron has such a group for dense parameters and one instance of the distributed optimizer; for
experts whose own tensor parallelism is on, and for several instances, all ranks create it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import distributed

from megatron_eopt.base.agreement import any_rank, group_ranks_in, ranks_of
from megatron_eopt.storage.shard import Ranks


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


def redistribution_grids(groups: Sequence[tuple[Any, Any, Any]]) -> list[RankGrid]:
    """Return the grids that are spanned by groups; all ranks of the world call this together.

    Args:
        groups: For each grid the tensor-parallel group, the one over which buffers are cut into
            fragments, and one of Megatron's that may be the grid already. Any may be None.
    """
    places = group_ranks_in([group for tensor, data, _ in groups for group in (tensor, data)])
    grids = []
    for (_, data_group, existing), tensor, data in zip(
        groups, places[::2], places[1::2], strict=True
    ):
        classes: dict[int, list[int]] = {}
        for rank, place in enumerate(tensor):
            # the first rank of a tensor-parallel group stands for all of it
            classes.setdefault(data[place.first].first, []).append(rank)
        mine = next(ranks for ranks in classes.values() if distributed.get_rank() in ranks)
        known = (group for group in (data_group, existing) if group is not None)
        group = next((group for group in known if sorted(ranks_of(group)) == mine), None)
        if any_rank(group is None and len(mine) > 1):
            made = [distributed.new_group(ranks) for ranks in classes.values()]
            group = made[list(classes.values()).index(mine)] if len(mine) > 1 else None
        # fragments are numbered by the rank in the group, whatever its global rank
        tensor_ranks = tuple(tensor[rank].number for rank in ranks_of(group))
        data_ranks = tuple(data[rank].number for rank in ranks_of(group))
        grids.append(RankGrid(Ranks.of(group), tensor_ranks, data_ranks, max(tensor_ranks) + 1))
    return grids
