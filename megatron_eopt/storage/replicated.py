"""Fragments under a DDP that all-reduces gradients: every rank holds all of them already.

Such a DDP has buffers for gradients only, and its parameters lie apart. They are moved into one
flat buffer in the layout of Megatron's distributed optimizer, so that all else, from fragments to
checkpoints, is as if DDP had been told to use it. Only gradients are not reduced a second time:
each rank reads its fragment of them where they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, distributed

__all__ = ["ReplicatedBuffer"]


class _Bucket:
    """What Megatron's distributed optimizer asks of a bucket.

    Attributes:
        params_list: Its parameters.
        offset: Its first element in the buffer.
        numel_unpadded: Elements, without the padding at the end.
        grad_data: Only the size of the gradients, which lie in DDP's own buffer.
        param_data: The parameters.
    """

    def __init__(self, params: Sequence[Tensor], param_data: Tensor, numel_unpadded: int) -> None:
        self.params_list = list(params)
        self.params = set(params)
        self.offset = 0
        self.numel_unpadded = numel_unpadded
        self.grad_data = torch.empty(param_data.numel(), device="meta")
        self.param_data = param_data


class ReplicatedBuffer:
    """The parameters of one of DDP's gradient buffers, moved into a flat buffer with one bucket.

    Args:
        buffer: DDP's buffer.
    """

    def __init__(self, buffer: Any) -> None:
        self.params: list[Tensor] = list(buffer.params)
        self.param_indices = buffer.param_indices
        self.param_dtype, self.grad_dtype = buffer.param_dtype, buffer.grad_dtype
        self.ddp_config = buffer.ddp_config
        self.data_parallel_group = buffer.data_parallel_group
        self.data_parallel_world_size = distributed.get_world_size(buffer.data_parallel_group)
        layout = DistributedOptimizer._compute_per_buffer_param_layout(
            self.params, None, self.data_parallel_world_size, self.ddp_config, self.param_indices
        )
        self.param_index_map = layout.param_index_map
        self.num_optimizer_shards = layout.num_optimizer_shards
        self.numel_unpadded = layout.per_bucket_numel_unpadded[0]
        self._param_data = torch.zeros(
            layout.bucket_indices[0][1], dtype=self.param_dtype, device=self.params[0].device
        )
        self.buckets = [_Bucket(self.params, self._param_data, self.numel_unpadded)]
        with torch.no_grad():
            for param, (start, stop, _) in self.param_index_map.items():
                view = self._param_data[start:stop].view(param.shape)
                view.copy_(param)
                param.data = view

    def gather_params(self) -> None:
        """Collect every rank's fragments; collective over the data-parallel group."""
        if self.data_parallel_world_size == 1:
            return
        shards = self._param_data.chunk(self.data_parallel_world_size)
        mine = shards[distributed.get_rank(self.data_parallel_group)]
        distributed.all_gather_into_tensor(
            self._param_data, mine.clone(), group=self.data_parallel_group
        )
