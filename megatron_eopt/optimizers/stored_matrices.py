"""Maps elements of a stored tensor to logical matrices."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_eopt.layouts.boxes import Boxes, Int64Array, ragged_arange
from megatron_eopt.storage.shard import Shard


def _boxes(shard: Shard) -> tuple[Int64Array, Boxes]:
    """Return the boxes that a rank stores of a shard, after each box's matrix index."""
    pieces = [layout.piece(shard.ranks.rank) for layout in shard.layouts]
    return np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces]), Boxes.join(pieces)


def runs_of(shard: Shard) -> Int64Array:
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

    def __init__(self, shard: Shard, device: torch.device) -> None:
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

    def multiply_(self, stored: Tensor, factors: Sequence[float]) -> None:
        """Multiply each matrix by its factor, in place."""
        torch._foreach_mul_(self._views(stored), [factors[n] for n in self._numbers])

    def square_sums(self, stored: Tensor) -> Tensor:
        """Return each matrix's sum of squares, counting only source copies; float64 ``(n,)``."""
        total = torch.zeros(self._count, dtype=torch.float64, device=stored.device)
        if not self._places:
            return total
        # in float64 the squares of finite float32 numbers do not overflow
        norms = torch._foreach_norm(self._views(stored), 2, dtype=torch.float64)
        return total.index_add_(0, self._matrix, torch.stack(norms).square() * self._counted)

    def _views(self, stored: Tensor) -> list[Tensor]:
        flat = stored.contiguous().view(-1)
        return [
            flat.as_strided((height, width), (stride, 1), flat.storage_offset() + offset)
            for height, width, stride, offset in self._places
        ]
