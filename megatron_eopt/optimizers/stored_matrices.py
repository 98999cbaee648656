"""Maps elements of a stored tensor to logical matrices."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.names import Int64Array
from megatron_eopt.layouts.boxes import Boxes, ragged_arange
from megatron_eopt.storage.shard import ParamShard


def _boxes(shard: ParamShard) -> tuple[Int64Array, Boxes]:
    """Return the boxes that a rank stores of a shard, after each box's matrix index."""
    pieces = [layout.piece(shard.ranks.rank) for layout in shard.layouts]
    return np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces]), Boxes.join(pieces)


def runs_of(shard: ParamShard) -> Int64Array:
    """Return the contiguous runs that a rank stores of a shard, each in one row of one matrix.

    The result is int64 ``(runs, 4)``, sorted by start: start in the tensor, row (counted over all
    matrices of the shard), column, length.
    """
    matrix, boxes = _boxes(shard)
    above = np.cumsum([0, *(layout.shape[0] for layout in shard.layouts)])[matrix]
    height, down = boxes.height, ragged_arange(boxes.height)
    columns = (boxes.offset, boxes.row + above, boxes.column, boxes.width)
    runs = np.stack([np.repeat(values, height) for values in columns], axis=1)
    runs[:, 0] += down * np.repeat(boxes.stride, height)
    runs[:, 1] += down
    return runs[np.argsort(runs[:, 0], kind="stable")]


class StoredMatrices:
    """The logical matrices in a rank's tensor, as strided views."""

    def __init__(self, shard: ParamShard, device: torch.device) -> None:
        matrix, boxes = _boxes(shard)
        self._count = len(shard.layouts)
        self._numbers = matrix.tolist()
        self._matrix = torch.tensor(matrix, device=device)
        # 1 where this rank's copy counts, 0 where another rank's does
        self._counted = torch.tensor(boxes.source, dtype=torch.float64, device=device)
        places = zip(boxes.height, boxes.width, boxes.stride, boxes.offset, strict=True)
        self._places = [tuple(map(int, place)) for place in places]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of this object."""
        return [self._matrix, self._counted]

    def multiply_(self, stored: Tensor, factors: Sequence[float] | Tensor) -> None:
        """Multiply each matrix by its factor, in place; ``stored`` is contiguous."""
        if self._places:
            torch._foreach_mul_(self._views(stored), [factors[n] for n in self._numbers])

    def sums(self, stored: Tensor) -> Tensor:
        """Return each matrix's sum, counting only source copies; float64 ``(n,)``."""
        return self._added([view.sum(dtype=torch.float64) for view in self._views(stored)], stored)

    def square_sums(self, stored: Tensor) -> Tensor:
        """Return each matrix's sum of squares, counting only source copies; float64 ``(n,)``."""
        views = self._views(stored)
        # in float64 the squares of finite float32 numbers do not overflow
        norms = torch._foreach_norm(views, 2, dtype=torch.float64) if views else ()
        return self._added([norm.square() for norm in norms], stored)

    def _added(self, of_boxes: Sequence[Tensor], stored: Tensor) -> Tensor:
        total = torch.zeros(self._count, dtype=torch.float64, device=stored.device)
        if not of_boxes:
            return total
        return total.index_add_(0, self._matrix, torch.stack(list(of_boxes)) * self._counted)

    def _views(self, stored: Tensor) -> list[Tensor]:
        # views of the tensor itself if it is contiguous, else of a copy, which is enough for sums
        flat = stored.contiguous().view(-1)
        return [
            flat.as_strided((height, width), (stride, 1), flat.storage_offset() + offset)
            for height, width, stride, offset in self._places
        ]


class MatrixSums:
    """Sums over whole matrices, to which each rank of a group adds what it stores.

    Without a ``group``, each rank's sums are its own.
    """

    def __init__(
        self, shards: Sequence[ParamShard], device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.stored = [StoredMatrices(shard, device) for shard in shards]
        self._counts = [len(shard.layouts) for shard in shards]
        self._device, self._group = device, group

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of this object."""
        return [tensor for stored in self.stored for tensor in stored.tensors]

    def totals(
        self, numbers: Sequence[int], own_sums: Mapping[int, Sequence[Tensor]], kinds: int
    ) -> dict[int, Tensor]:
        """Return the totals of some shards, float64 ``(kinds, matrices)``; one all-reduce.

        Args:
            numbers: Indices of the shards, the same on all ranks.
            own_sums: This rank's sums ``(matrices,)`` of each kind, for those that it has.
            kinds: Number of sums for each matrix.
        """
        sizes = [self._counts[number] for number in numbers]
        total = torch.zeros(kinds, sum(sizes), dtype=torch.float64, device=self._device)
        # views, which the all-reduce fills with the totals; shards that this rank lacks stay 0
        parts = dict(zip(numbers, torch.split(total, sizes, dim=1), strict=True))
        for number, sums in own_sums.items():
            parts[number].copy_(torch.stack(list(sums)))
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return parts
