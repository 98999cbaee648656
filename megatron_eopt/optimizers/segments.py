"""Which elements of a rank's stored piece of a parameter belong to which logical matrix."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.layouts.boxes import Boxes
from megatron_eopt.optimizers.stored import Stored, storage_layouts

__all__ = ["Segments", "SquareNorms"]


@dataclass(frozen=True)
class Segments:
    """A rank's flattened piece of a parameter as runs, each inside one row of one matrix.

    Attributes:
        matrix: Index of each run's matrix among the parameter's; int64 ``(runs,)``.
        length: Elements of each run, int64 ``(runs,)``; they follow one another without gaps.
        counted: 1 where this rank's copy is the source, 0 where another rank's is; float64
            ``(runs,)``.
        matrices: Number of matrices.
    """

    matrix: Tensor
    length: Tensor
    counted: Tensor
    matrices: int

    @classmethod
    def of(cls, parameter: Stored, rank: int, device: torch.device) -> "Segments":
        """Return the runs of what ``rank`` stores."""
        pieces = [layout.piece(rank) for layout in storage_layouts(parameter)]
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
        )

    def per_run(self, factors: Sequence[float]) -> Tensor:
        """Return float32 ``(runs,)`` from one factor a matrix."""
        return torch.tensor(factors, dtype=torch.float32, device=self.matrix.device)[self.matrix]

    def multiply_(self, stored: Tensor, per_run: Tensor) -> None:
        """Multiply each run by its factor, in place."""
        flat = stored.view(-1)
        flat.mul_(per_run.repeat_interleave(self.length, output_size=flat.numel()))

    def square_sums(self, stored: Tensor) -> Tensor:
        """Return every matrix's sum of squares over what is counted, float64 ``(matrices,)``."""
        squares = stored.reshape(-1).to(torch.float32).square()
        sums = torch.segment_reduce(squares, "sum", lengths=self.length, unsafe=True)
        total = torch.zeros(self.matrices, dtype=torch.float64, device=stored.device)
        return total.index_add_(0, self.matrix, sums.to(torch.float64) * self.counted)


class SquareNorms:
    """Squared Frobenius norms of whole matrices from the pieces that the ranks store.

    Args:
        parameters: The parameters.
        rank: This rank in the group.
        group: The ranks that store pieces; None if all is here.
        device: Where the tensors live.
    """

    def __init__(
        self,
        parameters: Sequence[Stored],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._group = group
        segments = [Segments.of(parameter, rank, device) for parameter in parameters]
        self._first = [0]
        for item in segments:
            self._first.append(self._first[-1] + item.matrices)
        self._several = {i: item for i, item in enumerate(segments) if item.matrices > 1}
        self._single = [i for i, item in enumerate(segments) if item.matrices == 1]
        self._places = torch.tensor(
            [self._first[i] for i in self._single], dtype=torch.int64, device=device
        )
        # all elements of a lone matrix's piece are counted, or none
        self._counted = (
            torch.stack(
                [
                    segments[i].counted.new_tensor(bool(segments[i].counted.any()))
                    for i in self._single
                ]
            )
            if self._single
            else torch.empty(0, device=device)
        )

    def of(self, values: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the squared norms of several lists of tensors; one all-reduce over the group.

        Args:
            values: Lists of stored pieces, each in the order of the parameters.

        Returns:
            float64 ``(len(values), matrices)``, the same on all ranks.
        """
        device = self._places.device
        result = torch.zeros(len(values), self._first[-1], dtype=torch.float64, device=device)
        for row, pieces in zip(result, values, strict=True):
            if self._single:
                # a float32 sum over a whole weight loses up to four digits on a CPU
                norms = torch._foreach_norm(
                    [pieces[i] for i in self._single], 2, dtype=torch.float64
                )
                row.index_add_(0, self._places, torch.stack(norms).square_() * self._counted)
            for i, segments in self._several.items():
                row[self._first[i] : self._first[i + 1]] = segments.square_sums(pieces[i])
        if self._group is not None:
            dist.all_reduce(result, group=self._group)
        return result
