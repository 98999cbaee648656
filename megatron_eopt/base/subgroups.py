"""Process groups that their members alone make."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group


def group_of_members(ranks: Sequence[int]) -> Any:
    """Return a new group of some global ranks; they alone call this together.

    NCCL splits a world that was initialized with a ``device_id``, and all of its ranks would have
    to take part in that; there the group is connected by its first collective call instead.
    """
    options: Any = None
    if _get_default_group().bound_device_id is not None and "nccl" in dist.get_backend_config():
        options = dist.ProcessGroupNCCL.Options()
        options.lazy_init = True
        options._timeout = dist.distributed_c10d._get_default_timeout(dist.Backend("nccl"))
    return dist.new_group(list(ranks), use_local_synchronization=True, pg_options=options)
