"""Which elements of a stored tensor belong to which matrix, and what their squares sum to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_eopt.layouts.boxes import Boxes, Int64Array, ragged_arange
from megatron_eopt.stores.shard import Shard


def runs_of(shard: Shard) -> Int64Array:
    """Return the runs without gaps that a rank stores of a shard, in the order of its tensor.

    Each lies inside one row of one matrix: its start in the tensor, matrix, row, counted over all
    matrices of the shard, column, length, and 1 where this rank's copy is the source; int64
    ``(runs, 6)``.
    """
    pieces = [layout.piece(shard.ranks.rank) for layout in shard.layouts]
    matrix = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    above = np.cumsum([0, *(layout.shape[0] for layout in shard.layouts)])[matrix]
    boxes = Boxes.join(pieces)
    height, down = boxes.height, ragged_arange(boxes.height)
    columns = (boxes.offset, matrix, boxes.row + above, boxes.column, boxes.width, boxes.source)
    runs = np.stack([np.repeat(values, height) for values in columns], axis=1)
    runs[:, 0] += down * np.repeat(boxes.stride, height)
    runs[:, 2] += down
    return runs[np.argsort(runs[:, 0], kind="stable")]


@dataclass(frozen=True)
class MatrixRuns:
    """A rank's flattened tensor as runs without gaps, each inside one row of one matrix."""

    matrix: Tensor  # index of each run's matrix among the parameter's; int64 ``(runs,)``
    length: Tensor  # elements of each run; int64 ``(runs,)``
    # 1 where this rank's copy is the source, 0 where another rank's is; float64 ``(runs,)``
    counted: Tensor
    matrices: int  # number of matrices
    counts_at_all: bool  # whether anything is counted, known on the host

    @classmethod
    def of(cls, shard: Shard, device: torch.device) -> "MatrixRuns":
        """Return the runs of what this rank stores."""
        _, matrix, _, _, length, source = runs_of(shard).T
        return cls(
            torch.tensor(matrix, device=device),
            torch.tensor(length, device=device),
            torch.tensor(source, dtype=torch.float64, device=device),
            len(shard.layouts),
            bool(source.any()),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All that it keeps."""
        return [self.matrix, self.length, self.counted]

    def per_run(self, factors: Sequence[float]) -> Tensor:
        """Return float32 ``(runs,)`` from one factor a matrix."""
        return torch.tensor(factors, dtype=torch.float32, device=self.matrix.device)[self.matrix]

    def multiply_(self, stored: Tensor, per_run: Tensor) -> None:
        """Multiply each run by its factor, in place."""
        flat = stored.view(-1)
        flat.mul_(per_run.repeat_interleave(self.length, output_size=flat.numel()))

    def square_sums(self, stored: Tensor) -> Tensor:
        """Return every matrix's sum of squares over what is counted, float64 ``(matrices,)``."""
        if not self.counts_at_all:
            return torch.zeros(self.matrices, dtype=torch.float64, device=stored.device)
        if self.matrices == 1:
            # all elements of a lone matrix's piece are counted, or none; a float32 sum over a whole
            # weight loses up to four digits on a CPU
            norm: Tensor = torch.linalg.vector_norm(stored, dtype=torch.float64)
            return norm.square_().view(1)
        # squares of finite numbers are finite in float64 alone
        squares = stored.reshape(-1).to(torch.float64, copy=True).square_()
        sums = torch.segment_reduce(squares, "sum", lengths=self.length, unsafe=True)
        total = torch.zeros(self.matrices, dtype=torch.float64, device=stored.device)
        return total.index_add_(0, self.matrix, sums * self.counted)
