"""Which elements of a stored tensor belong to which matrix, and what their squares sum to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_eopt.layouts.boxes import Boxes
from megatron_eopt.stores.shard import Shard


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
        pieces = [layout.piece(shard.ranks.rank) for layout in shard.layouts]
        matrix = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        boxes = Boxes.join(pieces)
        # boxes are runs of full storage rows, so one after another they fill the piece
        order = np.argsort(boxes.offset, kind="stable")
        boxes, matrix = boxes.take(order), matrix[order]
        height = boxes.height

        def per_row(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.tensor(np.repeat(values, height), dtype=dtype, device=device)

        return cls(
            per_row(matrix, torch.int64),
            per_row(boxes.width, torch.int64),
            per_row(boxes.source, torch.float64),
            len(pieces),
            bool(boxes.source.any()),
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
