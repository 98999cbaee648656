"""Layouts: which rank stores which part of a logical matrix, and where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts.boxes import (
    OFFSET,
    RANK,
    ROW,
    SOURCE,
    STRIDE,
    Boxes,
    Int64Array,
    IntLike,
    matching,
    ragged_arange,
)
from megatron_eopt.layouts.cover import check_cover

__all__ = ["Layout", "even_sizes"]

type Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the elements of one logical matrix are, over the ranks of one group.

    A **piece** is what one rank holds: boxes that map rectangles of the matrix to places in that
    rank's flattened storage tensor, which may also hold other matrices (Q, K and V of a fused
    weight). Several ranks may hold the same elements; exactly one of them is the source.

    Attributes:
        shape: Rows and columns of the logical matrix.
        boxes: The pieces of all ranks.
    """

    shape: tuple[int, int]
    boxes: Boxes

    @classmethod
    def whole(cls, shape: tuple[int, int], owner: int) -> "Layout":
        """The whole matrix at one rank."""
        return cls.replicated(shape, [owner])

    @classmethod
    def replicated(cls, shape: tuple[int, int], ranks: Sequence[int]) -> "Layout":
        """The whole matrix at every one of ``ranks``; the first is the source."""
        return cls.slabs(shape, 0, [list(ranks)])

    @classmethod
    def slabs(
        cls,
        shape: tuple[int, int],
        dim: Literal[0, 1],
        ranks: Sequence[int | Sequence[int]],
        sizes: Sequence[int] | None = None,
    ) -> "Layout":
        """Rows (``dim`` 0) or columns (``dim`` 1) cut over ranks.

        Args:
            shape: Rows and columns.
            dim: What is cut.
            ranks: For each slab its rank, or all ranks that hold a copy of it, the source first.
            sizes: Rows or columns of each slab; by default even, the first ones larger by one.

        Raises:
            ConfigurationError: If the sizes do not add up to the matrix.
        """
        sizes = even_sizes(shape[dim], len(ranks)) if sizes is None else list(sizes)
        if len(sizes) != len(ranks) or sum(sizes) != shape[dim] or min(sizes, default=0) < 0:
            rule = f"must be {len(ranks)} sizes with the sum {shape[dim]}"
            raise ConfigurationError("sizes", sizes, rule, "Give the size of every slab")
        holders = [[r] if isinstance(r, int | np.integer) else list(r) for r in ranks]
        copies = np.array([len(h) for h in holders], np.int64)
        start = np.repeat(np.cumsum(sizes) - sizes, copies)
        size = np.repeat(np.array(sizes, np.int64), copies)
        rows, cols = shape
        boxes = Boxes.make(
            rank=np.array([r for h in holders for r in h], np.int64),
            row=start if dim == 0 else 0,
            column=start if dim == 1 else 0,
            height=size if dim == 0 else rows,
            width=size if dim == 1 else cols,
            offset=0,
            stride=size if dim == 1 else cols,
            source=(ragged_arange(copies) == 0).astype(np.int64),
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
        source: IntLike = 1,
    ) -> "Layout":
        """Runs of rows of a wider local tensor, as fused weights have them.

        Args:
            shape: Rows and columns of the logical matrix.
            rank: The rank that holds each run.
            local: First row of each run in that rank's local tensor.
            logical: First row of each run in the logical matrix.
            length: Rows of each run.
            first_col: Logical column of the local tensor's column 0.
            held_cols: Columns of the local tensor; all by default.
            source: 1 where this copy is the one that is sent.
        """
        width = np.asarray(shape[1] if held_cols is None else held_cols, np.int64)
        boxes = Boxes.make(
            rank=rank,
            row=logical,
            column=first_col,
            height=length,
            width=width,
            offset=np.asarray(local, np.int64) * width,
            stride=width,
            source=source,
        )
        return cls(shape, boxes)

    def select_rows(self, start: IntLike, count: IntLike) -> "Layout":
        """The matrix that consists of the given runs of rows of this one, in their order.

        Storage stays what it is: this takes Q out of a fused weight, or one expert out of many.
        """
        start, count = (np.atleast_1d(np.asarray(x, np.int64)) for x in (start, count))
        start, count = start[count > 0], count[count > 0]
        logical = np.cumsum(count) - count
        order = np.argsort(start, kind="stable")
        first = np.searchsorted((start + count)[order], self.boxes.row, "right")
        last = np.searchsorted(start[order], self.boxes.bottom, "left")
        counts = np.maximum(last - first, 0)
        run = order[np.repeat(first, counts) + ragged_arange(counts)]
        boxes = self.boxes.take(np.repeat(np.arange(len(counts)), counts))
        boxes = boxes.clip(start[run], start[run] + count[run], 0, self.shape[1])
        boxes = boxes.replace(ROW, boxes.row + (logical - start)[run])
        return Layout((int(count.sum()), self.shape[1]), boxes)

    def fragments(self, rank: IntLike, holder: IntLike, start: IntLike, stop: IntLike) -> "Layout":
        """Cut the storage tensors of this layout into flat ranges that other ranks hold.

        Args:
            rank: The rank that holds fragment ``i``.
            holder: The rank of *this* layout whose flattened storage is cut, for instance the
                tensor-parallel coordinate.
            start: First element of the fragment in that storage.
            stop: One past its last element. Place ``start`` becomes place 0 of the rank's storage.
        """
        rank, holder, start, stop = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(x, np.int64)) for x in (rank, holder, start, stop))
        )
        i, j = matching(holder, self.boxes.rank)
        pieces = _crop(self.boxes.take(j), start[i], stop[i], rank[i])
        return Layout(self.shape, pieces)

    def with_sources(self, ranks: Sequence[int]) -> "Layout":
        """Let exactly the copies at ``ranks`` be sources."""
        chosen = np.isin(self.boxes.rank, np.asarray(ranks, np.int64))
        return Layout(self.shape, self.boxes.replace(SOURCE, chosen.astype(np.int64)))

    def renumbered(self, ranks: Mapping[int, int]) -> "Layout":
        """Rename ranks, for instance from coordinates to ranks of a larger group."""
        new = np.array([ranks[int(rank)] for rank in self.boxes.rank], np.int64)
        return Layout(self.shape, self.boxes.replace(RANK, new))

    def compact(self) -> "Layout":
        """The same pieces, each stored by itself as a dense local matrix: a compute layout.

        Raises:
            ConfigurationError: If a rank's piece is not a set of rows with the same columns.
        """
        table = self.boxes.table[np.lexsort((self.boxes.row, self.boxes.rank))]
        boxes = Boxes(table)
        new = np.concatenate([[True], boxes.rank[1:] != boxes.rank[:-1]])[: len(boxes)]
        same = (boxes.column[1:] == boxes.column[:-1]) & (boxes.width[1:] == boxes.width[:-1])
        if not np.all(same | new[1:]):
            rank = int(boxes.rank[1:][~(same | new[1:])][0])
            rule = "must hold the same columns in every run of rows to compute on it in place"
            raise ConfigurationError("rank", rank, rule, "Use mode exchange for such a storage")
        above = np.cumsum(boxes.height) - boxes.height
        above -= np.maximum.accumulate(np.where(new, above, 0))
        boxes = boxes.replace(OFFSET, above * boxes.width).replace(STRIDE, boxes.width)
        return Layout(self.shape, boxes)

    def local_shape(self, rank: int) -> tuple[int, int] | None:
        """Rows and columns of a rank's dense local matrix, None if it holds nothing.

        Raises:
            ConfigurationError: If the piece is not dense, see :meth:`compact`.
        """
        piece = self.piece(rank)
        if not len(piece):
            return None
        width, total = int(piece.width[0]), int(piece.area.sum())
        dense = np.all(piece.stride == width) and np.all(piece.width == width)
        if not dense or int(piece.extent.max()) != total:
            rule = f"must hold a dense local matrix to compute on, and holds {piece.table.tolist()}"
            raise ConfigurationError("rank", rank, rule, "Use Layout.compact or Layout.whole")
        return total // width, width

    def piece(self, rank: int) -> Boxes:
        """What ``rank`` holds."""
        return self.boxes.take(self.boxes.rank == rank)

    def held(self, world_size: int) -> Int64Array:
        """Elements that each rank holds; int64 ``(world_size,)``."""
        counts = np.zeros(world_size, np.int64)
        np.add.at(counts, self.boxes.rank, self.boxes.area)
        return counts

    def check(self, name: str, world_size: int) -> None:
        """Raise unless the sources cover every element exactly once.

        Raises:
            ConfigurationError: Naming the matrix, the rank and the range.
        """
        matrix = np.zeros(len(self.boxes), np.int64)
        check_cover([name], [self.shape], matrix, self.boxes, world_size)


def even_sizes(total: int, parts: int) -> list[int]:
    """Cut ``total`` into sizes that differ by at most one, the larger ones first."""
    small, larger = divmod(total, parts)
    return [small + (i < larger) for i in range(parts)]


def _crop(boxes: Boxes, start: Int64Array, stop: Int64Array, rank: Int64Array) -> Boxes:
    """Keep of box ``i`` the storage range ``[start, stop)``: a part of a row, rows, a part."""
    row_start = boxes.offset - start
    # the first row that ends after `start`, the last one that begins before `stop`
    first = np.maximum((-row_start - boxes.width) // boxes.stride + 1, 0)
    last = np.minimum(-((boxes.offset - stop) // boxes.stride) - 1, boxes.height - 1)
    left = np.maximum(-(row_start + first * boxes.stride), 0)
    right = np.minimum(stop - boxes.offset - last * boxes.stride, boxes.width)
    one_row, rows = first == last, first < last
    top, bottom = rows & (left > 0), rows & (right < boxes.width)

    def part(low: Int64Array, high: Int64Array, a: IntLike, b: IntLike, keep: Mask) -> Boxes:
        a, b = np.asarray(a, np.int64), np.asarray(b, np.int64)
        return Boxes.make(
            rank=rank,
            row=boxes.row + low,
            column=boxes.column + a,
            height=np.where(keep, high - low + 1, 0),
            width=b - a,
            offset=row_start + low * boxes.stride + a,
            stride=boxes.stride,
            source=boxes.source,
        )

    parts = [
        part(first, first, left, right, one_row),
        part(first, first, left, boxes.width, top),
        part(first + top, last - bottom, 0, boxes.width, rows),
        part(last, last, 0, right, bottom),
    ]
    return Boxes.join(parts)
