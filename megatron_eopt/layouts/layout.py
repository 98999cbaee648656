"""Layouts: which rank stores which part of a logical matrix, and where."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import Int64Array
from megatron_eopt.layouts.boxes import (
    COLUMN,
    OFFSET,
    ROW,
    SOURCE,
    STRIDE,
    Boxes,
    IntLike,
    matching,
    ragged_arange,
)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the ranks of a group hold the elements of one logical matrix.

    A **piece** is what one rank holds: boxes that map rectangles of the matrix to offsets in the
    rank's flattened storage tensor. That tensor may also hold other matrices (Q, K and V of a fused
    weight). Several ranks may hold the same elements; exactly one of them is the source.
    """

    shape: tuple[int, int]  # rows and columns of the logical matrix
    boxes: Boxes  # the pieces of all ranks

    @classmethod
    def whole(cls, shape: tuple[int, int], owner: int) -> "Layout":
        """Return a layout with the whole matrix on one rank."""
        return _copies(shape, (owner,))

    @classmethod
    def replicated(cls, shape: tuple[int, int], ranks: Sequence[int]) -> "Layout":
        """Return a layout with the whole matrix on each of ``ranks``; the first is the source."""
        return _copies(shape, tuple(ranks))

    @classmethod
    def slabs(
        cls,
        shape: tuple[int, int],
        dim: Literal[0, 1],
        ranks: Sequence[int | Sequence[int]],
        sizes: Sequence[int] | None = None,
    ) -> "Layout":
        """Return a layout with rows (``dim`` 0) or columns (``dim`` 1) cut over ranks.

        ``ranks`` has an entry per slab: its rank, or all ranks with a copy of it, the source first.
        By default slabs are even, and the first ones are larger by one if necessary.
        """
        if sizes is None:
            small, larger = divmod(shape[dim], len(ranks))
            sizes = [small + (i < larger) for i in range(len(ranks))]
        holders = [np.atleast_1d(np.asarray(held, np.int64)) for held in ranks]
        copies = np.array([len(held) for held in holders], np.int64)
        start = np.repeat(np.cumsum(sizes) - sizes, copies)
        size = np.repeat(np.array(sizes, np.int64), copies)
        rows, cols = shape
        boxes = Boxes.make(
            rank=np.concatenate(holders),
            corner=(start, 0) if dim == 0 else (0, start),
            size=(size, cols) if dim == 0 else (rows, size),
            offset=0,
            # each slab is a dense matrix of its own, so the rows of a column slab are its width
            # apart
            stride=size if dim == 1 else cols,
            source=ragged_arange(copies) == 0,
        )
        return cls(shape, boxes)

    @classmethod
    def row_runs(
        cls,
        shape: tuple[int, int],
        *,
        rank: IntLike,
        local: IntLike,
        logical: IntLike,
        length: IntLike,
        first_col: IntLike = 0,
        held_cols: IntLike | None = None,
    ) -> "Layout":
        """Return a layout of row runs, as ranks hold of fused weights; see :class:`RowRuns`.

        Local tensors may have only the ``held_cols`` columns from ``first_col`` on.
        """
        width = np.asarray(shape[1] if held_cols is None else held_cols, np.int64)
        boxes = Boxes.make(
            rank=rank,
            corner=(logical, first_col),
            size=(length, width),
            offset=np.asarray(local, np.int64) * width,
            stride=width,
        )
        return cls(shape, boxes)

    def select_rows(self, start: IntLike, count: IntLike) -> "Layout":
        """Return the layout of the matrix that consists of the given runs of rows, in their order.

        Storage does not change. This selects Q from a fused weight, or one of many experts.
        """
        size = (count, self.shape[1])
        runs = Boxes.make(rank=0, corner=(start, 0), size=size, offset=0, stride=0)
        logical = np.cumsum(runs.height) - runs.height
        # Binary search needs runs in the order of rows, and the caller's order is that of the
        # result. A loop over runs would be slow: a fused weight has one for each head and rank.
        order = np.argsort(runs.row, kind="stable")
        # a box meets the runs that end after its first row and begin before its last
        first = np.searchsorted(runs.bottom[order], self.boxes.row, "right")
        last = np.searchsorted(runs.row[order], self.boxes.bottom, "left")
        counts = np.maximum(last - first, 0)
        run = order[np.repeat(first, counts) + ragged_arange(counts)]
        boxes = self.boxes.take(np.repeat(np.arange(len(counts)), counts)).clip(runs.take(run))
        # from rows of the parameter to rows of the selected matrix
        boxes = boxes.replace(ROW, boxes.row + (logical - runs.row)[run])
        return Layout((int(runs.height.sum()), self.shape[1]), boxes)

    def select_columns(self, runs: Sequence[tuple[int, int]]) -> "Layout":
        """Return the layout of the matrix of the given runs ``(start, count)`` of columns.

        Storage does not change. This selects Q from a fused weight that is stored transposed.
        """
        rows, width, selected = self.shape[0], 0, []
        for start, count in runs:
            run = Boxes.make(rank=0, corner=(0, start), size=(rows, count), offset=0, stride=0)
            boxes = self.boxes.clip(run)
            boxes = boxes.take(boxes.width > 0)
            selected.append(boxes.replace(COLUMN, boxes.column - start + width))
            width += count
        return Layout((rows, width), Boxes.join(selected))

    def fragments(self, rank: IntLike, holder: IntLike, start: IntLike, stop: IntLike) -> "Layout":
        """Return the layout after storage tensors are cut into flat ranges for other ranks.

        Rank ``rank[i]`` holds elements ``[start[i], stop[i])`` of the flattened storage tensor that
        ``holder[i]`` has in *this* layout. Its own storage begins at ``start[i]``.
        """
        rank, holder, start, stop = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(x, np.int64)) for x in (rank, holder, start, stop))
        )
        # every range with every box of its holder; `_crop` drops those that do not meet
        i, j = matching(holder, self.boxes.rank)
        return Layout(self.shape, _crop(self.boxes.take(j), start[i], stop[i], rank[i]))

    def with_sources(self, ranks: Sequence[int]) -> "Layout":
        """Return the layout with exactly the copies on ``ranks`` as sources."""
        chosen = np.isin(self.boxes.rank, np.asarray(ranks, np.int64))
        return Layout(self.shape, self.boxes.replace(SOURCE, chosen))

    def compact(self) -> "Layout":
        """Return a compute layout: the same pieces, each stored as a dense local matrix of its own.

        Raises:
            ConfigurationError: If the rows of a rank's piece do not all have the same columns.
        """
        boxes = self.boxes.take(np.lexsort((self.boxes.row, self.boxes.rank)))
        # where a rank's boxes begin; cut, because an empty layout has no first box
        new = np.concatenate([[True], boxes.rank[1:] != boxes.rank[:-1]])[: len(boxes)]
        same = (boxes.column[1:] == boxes.column[:-1]) & (boxes.width[1:] == boxes.width[:-1])
        odd = ~(same | new[1:])
        if odd.any():
            rank = int(boxes.rank[1:][odd][0])
            rule = "must hold the same columns of all its rows of a matrix to compute in place"
            raise ConfigurationError("rank", rank, rule, "Use tp_mode='exchange'")
        above = np.cumsum(boxes.height) - boxes.height
        # heights count anew from each rank's first box; they only grow, so the maximum is the
        # latest
        above -= np.maximum.accumulate(np.where(new, above, 0))
        boxes = boxes.replace(OFFSET, above * boxes.width).replace(STRIDE, boxes.width)
        return Layout(self.shape, boxes)

    def local_shape(self, rank: int) -> tuple[int, int] | None:
        """Return rows and columns of a rank's dense local matrix, or None if it holds nothing."""
        piece = self.piece(rank)
        if not len(piece):
            return None
        width, total = int(piece.width[0]), int(piece.area.sum())
        assert int(piece.extent.max()) == total, "a compute layout must be dense"
        return total // width, width

    def piece(self, rank: int) -> Boxes:
        """Return the boxes that ``rank`` holds."""
        return self.boxes.take(self.boxes.rank == rank)


@lru_cache(maxsize=1 << 16)
def _copies(shape: tuple[int, int], ranks: tuple[int, ...]) -> Layout:
    """Return a replicated layout; cached, since a model has few shapes and many matrices."""
    return Layout.slabs(shape, 0, [list(ranks)])


def _crop(boxes: Boxes, start: Int64Array, stop: Int64Array, rank: Int64Array) -> Boxes:
    """Restrict box ``i`` to storage range ``[start, stop)``: a partial row, rows, a partial row."""
    # the range starts at column `left` of row `top` and ends before column `right` of `bottom`
    low = np.maximum(start - boxes.offset, 0)
    high = np.minimum(stop - boxes.offset, boxes.height * boxes.stride)
    top, bottom = low // boxes.stride, high // boxes.stride
    left = low - top * boxes.stride
    right = np.minimum(high - bottom * boxes.stride, boxes.width)
    # the first whole row: `top`, unless the range begins within it
    full = top + (left > 0)
    edge = np.zeros_like(left)

    def part(row: Int64Array, height: IntLike, column: Int64Array, end: Int64Array) -> Boxes:
        return Boxes.make(
            rank=rank,
            corner=(boxes.row + row, boxes.column + column),
            size=(height, end - column),
            offset=boxes.offset - start + row * boxes.stride + column,
            stride=boxes.stride,
            source=boxes.source,
        )

    return Boxes.join(
        [
            # a range within a single row ends with the range, not with the row
            part(top, full - top, left, np.where(top < bottom, boxes.width, right)),
            part(full, bottom - full, edge, boxes.width),
            # if the range ends in the row where it begins, the first part has it already
            part(bottom, np.where(bottom < full, 0, 1), edge, right),
        ]
    )
