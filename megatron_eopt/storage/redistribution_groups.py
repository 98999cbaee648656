"""The ranks that together store whole matrices: tensor parallel x data parallel.

Megatron has such a group for dense parameters and one instance of the distributed optimizer; for
experts whose own tensor parallelism is on, and for several instances, there is none. It is then
created, by all ranks together and in one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

__all__ = ["Coordinates", "RankGrid", "data_parallel_only", "redistribution_groups"]


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
        group: The group; None if this rank is alone.
        tensor_ranks: Tensor-parallel coordinate of each member, in the group's order.
        data_ranks: Which fragment of a buffer each member holds, in the group's order.
        rank: This rank's place in the group.
        tensor_size: Ranks of the tensor-parallel group.
    """

    group: Any
    tensor_ranks: tuple[int, ...]
    data_ranks: tuple[int, ...]
    rank: int
    tensor_size: int


def data_parallel_only(ranks: RankGrid, group: Any) -> RankGrid:
    """Return the ranks that hold fragments of one tensor-parallel slab.

    Args:
        ranks: The redistribution group that this rank belongs to.
        group: Its data-parallel group.
    """
    size = distributed.get_world_size(group)
    return RankGrid(
        group=None if size == 1 else group,
        tensor_ranks=(0,) * size,
        data_ranks=tuple(range(size)),
        rank=distributed.get_rank(group),
        tensor_size=ranks.tensor_size,
    )


def redistribution_groups(wanted: Sequence[Coordinates]) -> list[RankGrid]:
    """Return one group per entry; all ranks of the world call this with as many entries.

    Args:
        wanted: What spans each group.
    """
    everyone = _gather_coordinates(wanted)
    result = []
    for number, mine in enumerate(wanted):
        table = everyone[:, number]
        classes = _classes(table)
        group = _find_or_create(mine, classes)
        result.append(_describe(table, classes, group))
    return result


def _gather_coordinates(wanted: Sequence[Coordinates]) -> torch.Tensor:
    """Return int64 (world, entries, 4): first rank and own place, tensor and data parallel."""
    rows = [_row(mine) for mine in wanted]
    device = torch.device("cuda", torch.cuda.current_device())
    local = torch.tensor(rows, dtype=torch.int64, device=device)
    gathered = local.new_empty((distributed.get_world_size(), *local.shape))
    distributed.all_gather_into_tensor(gathered.view(-1), local.view(-1))
    return gathered.cpu()


def _row(mine: Coordinates) -> list[int]:
    me = distributed.get_rank()
    row = []
    for group in (mine.tensor, mine.data):
        ranks = [me] if group is None else distributed.get_process_group_ranks(group)
        # fragments are numbered by the rank in the group, whatever its global rank
        row += [min(ranks), ranks.index(me)]
    return row


def _classes(table: torch.Tensor) -> list[list[int]]:
    """Partition the ranks: two belong together if they share one of the groups."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        while parent.setdefault(rank, rank) != rank:
            rank = parent[rank]
        return rank

    for rank in range(len(table)):
        for first in (int(table[rank, 0]), int(table[rank, 2])):
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
    fits = torch.tensor([found is not None or len(members) == 1], dtype=torch.int32, device="cuda")
    distributed.all_reduce(fits, op=distributed.ReduceOp.MIN)
    if fits.item():
        return found
    groups = [distributed.new_group(ranks) for ranks in classes if len(ranks) > 1]
    return next((group for group in groups if _members(group) == members), None)


def _members(group: Any) -> list[int]:
    ranks = distributed.get_process_group_ranks(group)
    return sorted(ranks) if distributed.get_rank() in ranks else []


def _describe(table: torch.Tensor, classes: list[list[int]], group: Any) -> RankGrid:
    me = distributed.get_rank()
    members = next(ranks for ranks in classes if me in ranks)
    if group is not None:
        members = distributed.get_process_group_ranks(group)
    alone = len(members) == 1
    return RankGrid(
        group=None if alone else group,
        tensor_ranks=tuple(int(table[rank, 1]) for rank in members),
        data_ranks=tuple(int(table[rank, 3]) for rank in members),
        rank=members.index(me),
        tensor_size=int(table[members, 1].max()) + 1,
    )
