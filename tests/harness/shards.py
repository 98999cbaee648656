"""Parameters cut in any way, drawn in one process and stored in others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_eopt.math import orthogonalize
from megatron_eopt.matrices import Split
from megatron_eopt.storage.shard import Fragment, ParamShard, Ranks, fragment_layouts


@dataclass(frozen=True)
class StoredParameter:
    """Which fragment of which tensor-parallel slab each rank of a group has."""

    name: str  # its name
    split: Split  # its logical matrices
    partition_dim: int  # dimension cut by tensor parallelism, -1 if none
    tensor_size: int  # number of slabs
    fragments: tuple[Fragment, ...]  # one for each rank

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return torch.Size(self.split.shape).numel()

    def shard(self, group: dist.ProcessGroup | None = None) -> ParamShard:
        """Return what this rank of ``group`` stores, flat."""
        ranks = Ranks.of(group)
        mine = self.fragments[ranks.rank]
        layouts = fragment_layouts(self.split, self.partition_dim, self.tensor_size, self.fragments)
        held = torch.empty(mine.stop - mine.start)
        return ParamShard(self.name, held, self.split, layouts, ranks, tuple(held.shape))


def newton_schulz(**settings: Any) -> Callable[..., None]:
    """Return what puts updates in the place of a stack of directions."""

    def update(stack: torch.Tensor, _: Any, reduce: Any, shape: tuple[int, int]) -> None:
        whole_shape = None if reduce is None else shape
        stack.copy_(orthogonalize(stack, reduce=reduce, whole_shape=whole_shape, **settings))

    return update
