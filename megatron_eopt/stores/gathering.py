"""Brings the weights that ranks have stepped to all of them."""

from typing import Any

import torch.distributed as dist
from torch import Tensor


def gather_buckets(model_chunk: Any, *, now: bool = False) -> None:
    """Gather the weights of a model that Megatron has wrapped; collective.

    Where that overlaps with the forward pass hooks do it, unless ``now``.
    """
    wrapped = model_chunk.ddp_config
    if wrapped.use_distributed_optimizer and (now or not wrapped.overlap_param_gather):
        model_chunk.start_param_sync(force_sync=now)


def gather_shards(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Bring every rank's equal shard of a flat tensor to all ranks."""
    shard = buffer.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    # a rank's own shard is read where the result is written
    dist.all_gather_into_tensor(buffer, shard.clone(), group=group)
