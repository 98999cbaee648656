"""Process groups that their members alone make."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _world

_made: Counter[tuple[int, ...]] = Counter()


def group_of_members(ranks: Sequence[int]) -> Any:
    """Return a new group of some global ranks; they alone call this together.

    Torch names groups by how many a rank has made, this kind with its ranks. Members of different
    teams have made different numbers, and could make no more groups together: here the ranks' own
    number takes its place, negative so that no other group has the name, and the count stays.

    NCCL splits a world that was initialized with a ``device_id``, and all of its ranks would have
    to take part in that; there the group is connected by its first collective call instead.
    """
    options: Any = None
    if _get_default_group().bound_device_id is not None and "nccl" in dist.get_backend_config():
        options = dist.ProcessGroupNCCL.Options()
        options.lazy_init = True
        options._timeout = dist.distributed_c10d._get_default_timeout(dist.Backend("nccl"))
    members, made = tuple(ranks), _world.group_count
    _made[members] += 1
    _world.group_count = -_made[members]
    try:
        return dist.new_group(members, use_local_synchronization=True, pg_options=options)
    finally:
        _world.group_count = made
