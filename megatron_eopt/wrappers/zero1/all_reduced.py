"""ZeRO-1 fragments for a DDP that all-reduces gradients, so that every rank has all of them.

Such a DDP has buffers for gradients only. Its parameters are moved into a flat buffer with the
layout of Megatron's distributed optimizer, so that everything from fragments to checkpoints works
as if DDP had been told to use it. But gradients are not reduced again: each rank reads its fragment
of DDP's buffer.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, distributed, nn


class AllReducedBuffer:
    """A flat one-bucket buffer for the trainable parameters of one of DDP's gradient buffers.

    If DDP overlaps the parameter gather, the hooks of its own buckets gather parameters.
    """

    def __init__(self, buffer: Any) -> None:
        pairs = zip(buffer.params, buffer.param_indices, strict=True)
        trained = [(param, index) for param, index in pairs if param.requires_grad]
        self.params: list[Tensor] = [param for param, _ in trained]
        self.param_indices = [index for _, index in trained]
        self.param_dtype, self.grad_dtype = self.params[0].dtype, buffer.grad_dtype
        self.ddp_config = buffer.ddp_config
        self.data_parallel_group = buffer.data_parallel_group
        self.data_parallel_world_size = distributed.get_world_size(self.data_parallel_group)
        # None: one bucket, however large, because nothing overlaps with its gather
        layout = DistributedOptimizer._compute_per_buffer_param_layout(
            self.params, None, self.data_parallel_world_size, self.ddp_config, self.param_indices
        )
        # in that layout, a shared embedding has a bucket of its own
        places = layout.param_index_map
        self.param_index_map = {param: (*places[param][:2], 0) for param in places}
        self.num_optimizer_shards = layout.num_optimizer_shards
        last, size = layout.bucket_indices[-1]
        self.numel_unpadded = last + layout.per_bucket_numel_unpadded[-1]
        self._data = torch.zeros(size, dtype=self.param_dtype, device=self.params[0].device)
        # the attributes that Megatron's distributed optimizer reads
        bucket = SimpleNamespace(
            params_list=self.params,
            params=set(self.params),
            offset=0,
            numel_unpadded=self.numel_unpadded,
            # only its size is read, since gradients are in DDP's own buffer
            grad_data=torch.empty(self._data.numel(), device="meta"),
            param_data=self._data,
        )
        self.buckets = [bucket]
        with torch.no_grad():
            for param, (start, stop, _) in self.param_index_map.items():
                view = self._data[start:stop].view(param.shape)
                view.copy_(param)
                # DDP's hooks and buffers know parameters as objects, so the data may move
                param.data = view
        self.gathered_by_hooks: bool = self.ddp_config.overlap_param_gather
        for overlapping in buffer.buckets if self.gathered_by_hooks else ():
            self._let_hooks_gather(overlapping)

    def gather(self) -> None:
        """All-gather every rank's fragment; collective over the data-parallel ranks."""
        shard = self._data.chunk(self.data_parallel_world_size)[self.data_parallel_group.rank()]
        # the shard is cloned because it is part of the output
        distributed.all_gather_into_tensor(
            self._data, shard.clone(), group=self.data_parallel_group
        )

    def _let_hooks_gather(self, bucket: Any) -> None:
        """Give Megatron's hooks the fragments of this buffer's parameters in one of DDP's buckets.

        The hooks gather a list of tensors from each rank, whose sizes may differ. Fragments of
        other optimizers in the same bucket are kept.
        """
        shard = self._data.numel() // self.data_parallel_world_size
        # of all optimizers that train parameters of this bucket, each built while the others' are
        # frozen
        by_param = bucket.__dict__.setdefault("fragments_of", {})
        for param in (param for param in bucket.params_list if param in self.param_index_map):
            start, stop, _ = self.param_index_map[param]
            by_param[param] = {
                rank: self._data[max(start, rank * shard) : min(stop, (rank + 1) * shard)]
                for rank in range(start // shard, -(-stop // shard))
            }
        ranks = range(self.data_parallel_world_size)
        by_rank = [[parts[rank] for parts in by_param.values() if rank in parts] for rank in ranks]
        # ``start_param_sync`` gathers these lists if DDP does not use the distributed optimizer
        bucket.set_layerwise_params_list(by_rank)


class AllReducedChunk(nn.Module):
    """Stands in for wrapped model chunks if a caller has only all-reduced parameters.

    Args:
        params: All parameters.
        pg_collection: Process groups with ``dp_cp`` and, for experts, ``expt_dp``.
    """

    def __init__(self, params: Sequence[Tensor], pg_collection: Any) -> None:
        super().__init__()
        self.ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
        self.config: Any = None
        # as in DDP's wrapper, this is no method of torch's
        self.buffers: list[Any] = []  # type: ignore[assignment]
        self.expert_parallel_buffers: list[Any] = []
        for key, (members, indices) in group_params_for_buffers(list(params), True).items():
            # the attributes that are read from DDP's gradient buffers
            buffer = SimpleNamespace(
                params=members,
                param_indices=indices,
                grad_dtype=key.grad_dtype,
                ddp_config=self.ddp_config,
                data_parallel_group=(
                    pg_collection.expt_dp if key.is_expert_parallel else pg_collection.dp_cp
                ),
            )
            kind = self.expert_parallel_buffers if key.is_expert_parallel else self.buffers
            kind.append(buffer)
        every = [*self.buffers, *self.expert_parallel_buffers]
        # their names are not known, and torch's method would refuse plain tensors
        for number, param in enumerate(param for buffer in every for param in buffer.params):
            self._parameters[f"parameter {number}"] = param
