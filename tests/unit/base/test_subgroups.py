"""Groups of some ranks, and groups that all ranks make after them."""

import torch
import torch.distributed as dist

from megatron_eopt.base.agreement import group_of_members
from tests.harness import run_ranks

TEAMS = ((0, 1), (1, 2), (0, 1), (1, 2, 3))


def sums():
    """Return what each team's ranks add up to, and all ranks."""
    rank, found = dist.get_rank(), {}
    for number, team in enumerate(TEAMS):
        if rank in team:
            group, value = group_of_members(team), torch.tensor(rank)
            dist.all_reduce(value, group=group)
            found[number] = int(value)
    value = torch.tensor(rank)
    dist.all_reduce(value, group=dist.new_group(range(4)))
    return found, int(value)


def test_ranks_of_different_teams_make_groups_together_afterwards():
    for rank, (found, everyone) in enumerate(run_ranks(4, sums, timeout=60)):
        assert found == {n: sum(team) for n, team in enumerate(TEAMS) if rank in team}
        assert everyone == 6
