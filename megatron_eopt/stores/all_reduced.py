"""Fragments where every rank holds all gradients already, since DDP has all-reduced them.

Such a DDP has buffers for gradients only, and its parameters lie apart. They are moved into one
flat buffer in the layout of Megatron's distributed optimizer, so that all else, from fragments to
checkpoints, is as if DDP had been told to use it. Only gradients are not reduced a second time:
each rank reads its fragment of them where they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, distributed

from megatron_eopt.base.errors import ConfigurationError


class _Bucket:
    """What Megatron's distributed optimizer asks of a bucket."""

    def __init__(self, params: Sequence[Tensor], param_data: Tensor, numel_unpadded: int) -> None:
        self.params_list = list(params)
        self.params = set(params)
        self.offset = 0
        self.numel_unpadded = numel_unpadded
        # only its size is asked for: gradients lie in DDP's own buffer
        self.grad_data = torch.empty(param_data.numel(), device="meta")
        self.param_data = param_data


class AllReducedBuffer:
    """Parameters of one kind, moved into a flat buffer with one bucket.

    Args:
        params: The parameters.
        param_indices: Their places among all parameters of the kind's data types.
        grad_dtype: Of their gradients.
        ddp_config: How DDP was configured.
        group: The data-parallel ranks, which hold copies.
        overlaps: DDP's own buckets, whose hooks gather parameters in the forward pass.

    Attributes:
        gathered_by_hooks: Whether there are such buckets.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        param_indices: Sequence[int],
        grad_dtype: torch.dtype,
        ddp_config: Any,
        group: Any,
        overlaps: Sequence[Any] = (),
    ) -> None:
        self.params = list(params)
        self.param_indices = param_indices
        self.param_dtype, self.grad_dtype = params[0].dtype, grad_dtype
        self.ddp_config = ddp_config
        self.data_parallel_group = group
        self.data_parallel_world_size = distributed.get_world_size(group)
        layout = DistributedOptimizer._compute_per_buffer_param_layout(
            self.params, None, self.data_parallel_world_size, ddp_config, param_indices
        )
        self.param_index_map = layout.param_index_map
        self.num_optimizer_shards = layout.num_optimizer_shards
        self.numel_unpadded = layout.per_bucket_numel_unpadded[0]
        self._data = torch.zeros(
            layout.bucket_indices[0][1], dtype=self.param_dtype, device=params[0].device
        )
        self.buckets = [_Bucket(self.params, self._data, self.numel_unpadded)]
        with torch.no_grad():
            for param, (start, stop, _) in self.param_index_map.items():
                view = self._data[start:stop].view(param.shape)
                view.copy_(param)
                param.data = view
        self.gathered_by_hooks = bool(overlaps)
        for bucket in overlaps:
            bucket.set_layerwise_params_list(self._fragments_in(bucket))

    @classmethod
    def of_ddp(cls, buffer: Any) -> "AllReducedBuffer":
        """Take over the parameters of one of DDP's gradient buffers."""
        return cls(
            buffer.params,
            buffer.param_indices,
            buffer.grad_dtype,
            buffer.ddp_config,
            buffer.data_parallel_group,
            buffer.buckets if buffer.ddp_config.overlap_param_gather else (),
        )

    def gather(self) -> None:
        """Collect every rank's fragments; collective over the data-parallel ranks."""
        if self.data_parallel_world_size == 1:
            return
        mine = self._data.chunk(self.data_parallel_world_size)[
            distributed.get_rank(self.data_parallel_group)
        ]
        # a rank's own fragment is read where the result is written
        distributed.all_gather_into_tensor(self._data, mine.clone(), group=self.data_parallel_group)

    def _fragments_in(self, bucket: Any) -> list[list[Tensor]]:
        """Return, for every rank, views of what it steps of the parameters of one of DDP's buckets.

        Megatron's hooks gather such lists; sizes may differ between ranks.
        """
        shard = self._data.numel() // self.data_parallel_world_size
        fragments: list[list[Tensor]] = [[] for _ in range(self.data_parallel_world_size)]
        for param in bucket.params_list:
            start, stop, _ = self.param_index_map[param]
            for rank in range(start // shard, -(-stop // shard)):
                low, high = max(start, rank * shard), min(stop, (rank + 1) * shard)
                fragments[rank].append(self._data[low:high])
        return fragments


class AllReducedChunk:
    """What stands for wrapped model chunks where a caller has only parameters.

    Args:
        params: All parameters; gradients of each are the same on all its data-parallel ranks.
        pg_collection: Process groups with ``dp_cp`` and, for experts, ``expt_dp``.

    Raises:
        ConfigurationError: If a group is missing.
    """

    def __init__(self, params: Sequence[Tensor], pg_collection: Any) -> None:
        self.ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
        self.config: Any = None
        self.buffers: list[AllReducedBuffer] = []
        self.expert_parallel_buffers: list[AllReducedBuffer] = []
        for key, (members, indices) in group_params_for_buffers(list(params), True).items():
            name = "expt_dp" if key.is_expert_parallel else "dp_cp"
            group = getattr(pg_collection, name, None)
            if group is None:
                raise ConfigurationError(
                    f"pg_collection.{name}",
                    None,
                    "must be the ranks that hold copies of the parameters",
                    "Pass it, or the wrapped model as model_chunks",
                )
            buffer = AllReducedBuffer(members, indices, key.grad_dtype, self.ddp_config, group)
            kind = self.expert_parallel_buffers if key.is_expert_parallel else self.buffers
            kind.append(buffer)

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Return names by place, which is all there is, with the parameters."""
        every = [*self.buffers, *self.expert_parallel_buffers]
        params = [param for buffer in every for param in buffer.params]
        return [(f"parameter {number}", param) for number, param in enumerate(params)]
