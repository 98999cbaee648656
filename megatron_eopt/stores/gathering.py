"""Brings the weights that ranks have stepped to all of them.

Note [Gathering in place]
    gloo gathers into a temporary tensor as large as all that is gathered, and copies it. So on
    gloo ranks of one computer read each other's shards (Note [Reading a neighbour's memory]).
    Where they cannot, every rank broadcasts its shard, out of the buffer and into it: the same
    bytes on the wire, no temporary, and half the time or less.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.neighbours import read_shards
from megatron_eopt.base.upstream import check_instance


def gather_buckets(model_chunk: Any, *, now: bool = False) -> None:
    """Gather the weights of a model that Megatron has wrapped; collective.

    Where that overlaps with the forward pass hooks do it, unless ``now``. On gloo what lies in the
    buckets of Megatron's DDP is gathered as :func:`gather_shards` does it.
    """
    wrapped = model_chunk.ddp_config
    if not wrapped.use_distributed_optimizer or (wrapped.overlap_param_gather and not now):
        return
    # what is on its way already is the wrapper's to wait for
    bucket_groups = [
        one
        for kind in ("bucket_groups", "expert_parallel_bucket_groups")
        for one in getattr(model_chunk, kind, ())
        if not wrapped.overlap_param_gather
    ]
    for one in bucket_groups:
        check_instance("_ParamAndGradBucketGroup", one)
    ranks = [one.intra_distributed_optimizer_instance_group for one in bucket_groups]
    if not ranks or not all(map(_on_gloo, ranks)):
        model_chunk.start_param_sync(force_sync=now)
        return
    for one, group in zip(bucket_groups, ranks, strict=True):
        gather_shards([bucket.param_data for bucket in one.buckets], group)
        one.param_gather_dispatched = True
        one._post_param_sync()


def gather_shards(buffers: list[Tensor], group: dist.ProcessGroup) -> None:
    """Bring every rank's shard of flat tensors, of which it has an equal part, to all ranks.

    On gloo nothing is copied but what travels; see Note [Gathering in place].
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return
    by_rank = [buffer.chunk(size) for buffer in buffers]
    if not _on_gloo(group):
        for buffer, shards in zip(buffers, by_rank, strict=True):
            # a rank's own shard is read where the result is written
            dist.all_gather_into_tensor(buffer, shards[rank].clone(), group=group)
        return
    by_source = list(zip(*by_rank, strict=True))
    if all(buffer.is_cpu for buffer in buffers) and read_shards(by_source, group):
        return
    works = [
        dist.broadcast(shard, group=group, group_src=source, async_op=True)
        for shards in by_rank
        for source, shard in enumerate(shards)
    ]
    for work in works:
        assert work is not None
        work.wait()


def _on_gloo(group: dist.ProcessGroup) -> bool:
    return bool(dist.get_backend(group) == dist.Backend.GLOO)
