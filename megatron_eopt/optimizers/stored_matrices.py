"""Which elements of a stored tensor belong to which matrix."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_eopt.layouts.boxes import Boxes, Int64Array, ragged_arange
from megatron_eopt.storage.shard import Shard


def _boxes(shard: Shard) -> tuple[Int64Array, Boxes]:
    """Return what a rank stores of a shard's matrices, with the number of each box's matrix."""
    pieces = [layout.piece(shard.ranks.rank) for layout in shard.layouts]
    return np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces]), Boxes.join(pieces)


def runs_of(shard: Shard) -> Int64Array:
    """Return the runs without gaps that a rank stores of a shard, in the order of its tensor.

    Each lies inside one row of one matrix: its start in the tensor, row, counted over all matrices
    of the shard, column and length; int64 ``(runs, 4)``.
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
    """The matrices of a rank's tensor, as boxes of it."""

    def __init__(self, shard: Shard, device: torch.device) -> None:
        matrix, boxes = _boxes(shard)
        self._count = len(shard.layouts)
        self._numbers = matrix.tolist()
        self._matrix = torch.tensor(matrix, device=device)
        # 1 where this rank's copy is the source
        self._counted = torch.tensor(boxes.source, dtype=torch.float64, device=device)
        places = zip(boxes.height, boxes.width, boxes.stride, boxes.offset, strict=True)
        self._places = [tuple(map(int, place)) for place in places]

    @property
    def tensors(self) -> list[Tensor]:
        """All that it keeps."""
        return [self._matrix, self._counted]

    def multiply_(self, stored: Tensor, factors: Sequence[float]) -> None:
        """Multiply each matrix by its factor, in place."""
        torch._foreach_mul_(self._views(stored), [factors[n] for n in self._numbers])

    def square_sums(self, stored: Tensor) -> Tensor:
        """Return every matrix's sum of squares over what is counted, float64 ``(matrices,)``."""
        total = torch.zeros(self._count, dtype=torch.float64, device=stored.device)
        if not self._places:
            return total
        # squares of finite numbers are finite in float64 alone
        norms = torch._foreach_norm(self._views(stored), 2, dtype=torch.float64)
        return total.index_add_(0, self._matrix, torch.stack(norms).square() * self._counted)

    def _views(self, stored: Tensor) -> list[Tensor]:
        flat = stored.reshape(-1)
        return [
            flat.as_strided((height, width), (stride, 1), flat.storage_offset() + offset)
            for height, width, stride, offset in self._places
        ]
