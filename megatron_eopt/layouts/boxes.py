"""Boxes: rectangles of logical matrices and their places in ranks' storage, as an integer table.

A run of rows, a tensor-parallel shard, a range of a flat buffer (at most three boxes per shard) and
intersections of these are all boxes. So layouts of thousands of ranks stay small, and operations on
them are vectorised.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_eopt.base.names import Int64Array

type Mask = npt.NDArray[np.bool_]
type IntLike = int | Int64Array | list[int]


def sum_of_weights(count: Int64Array) -> npt.NDArray[np.uint64]:
    """Return the sum of the first ``count`` weights modulo 2^64: a hash, which is 0 for 0."""
    # Multiplications and shifts that spread bits, with 2^64 over the golden ratio and the constant
    # of degski's 64-bit hash. numpy's arrays wrap around silently.
    value = count.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    value ^= value >> np.uint64(32)
    value *= np.uint64(0xD6E8FEB86659FD93)
    return value ^ value >> np.uint64(29)


def weights_of(low: Int64Array, high: Int64Array) -> npt.NDArray[np.uint64]:
    """Return the sum of the weights of each box's elements modulo 2^64, given its two corners.

    An element's weight is the product of fixed, seemingly random numbers, one of each index. So an
    element that is held twice does not make up for one that is missing, and a sum takes no time
    for elements: those of a box factor, and differences of prefix sums give each factor.
    """
    # other numbers for each dimension, else (i, j) would make up for (j, i)
    first = np.arange(low.shape[-1], dtype=np.int64) << np.int64(40)
    sides = sum_of_weights(high + first) - sum_of_weights(low + first)
    return np.asarray(np.multiply.reduce(sides, axis=-1), np.uint64)


RANK, ROW, COLUMN, HEIGHT, WIDTH, OFFSET, STRIDE, SOURCE, MATRIX, TENSOR = range(10)


class _Column:
    """A column of the table, as an attribute."""

    def __init__(self, field: int) -> None:
        self._field = field

    def __get__(self, boxes: "Boxes", _: type) -> Int64Array:
        return boxes.table[:, self._field]


@dataclass(frozen=True, eq=False)
class Boxes:
    """Rectangles ``[row, row + height) x [column, column + width)`` of logical matrices.

    Element ``(row + i, column + j)`` is element ``offset + i * stride + j`` of the flattened
    storage tensor of ``rank``. ``source`` is 1 if this copy is the one that is sent, 0 if it only
    receives. In a table of several layouts, ``matrix`` is the index of the matrix and ``tensor``
    that of the storage tensor.
    """

    # one array, so that joins, selections and hashes of many boxes are one numpy call each
    table: Int64Array  # int64 ``(n, 10)``; its columns are the attributes below, in order

    rank = _Column(RANK)
    row = _Column(ROW)
    column = _Column(COLUMN)
    height = _Column(HEIGHT)
    width = _Column(WIDTH)
    offset = _Column(OFFSET)
    stride = _Column(STRIDE)
    source = _Column(SOURCE)
    matrix = _Column(MATRIX)
    tensor = _Column(TENSOR)

    @classmethod
    def make(
        cls,
        *,
        rank: IntLike,
        corner: tuple[IntLike, IntLike],
        size: tuple[IntLike, IntLike],
        offset: IntLike,
        stride: IntLike,
        source: IntLike | Mask = 1,
    ) -> "Boxes":
        """Broadcast the columns against each other and drop empty boxes.

        ``corner`` is ``(row, column)`` and ``size`` is ``(height, width)``.
        """
        fields = (rank, *corner, *size, offset, stride, source, 0, 0)
        columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(f, np.int64)) for f in fields))
        # an empty box would have no valid `extent`, and would be matched with others for nothing
        table = np.stack(columns, axis=1)
        return cls(table[(table[:, HEIGHT] > 0) & (table[:, WIDTH] > 0)])

    @classmethod
    def join(cls, parts: list["Boxes"]) -> "Boxes":
        """Concatenate tables."""
        return cls(np.concatenate([np.empty((0, 10), np.int64), *(part.table for part in parts)]))

    def __len__(self) -> int:
        return len(self.table)

    def take(self, index: Int64Array | Mask) -> "Boxes":
        """Return the boxes that an index or mask selects."""
        return Boxes(self.table[index])

    def replace(self, field: int, values: IntLike | Mask) -> "Boxes":
        """Return a copy with one column (RANK ... TENSOR) replaced."""
        table = self.table.copy()
        table[:, field] = values
        return Boxes(table)

    def clip(self, other: "Boxes") -> "Boxes":
        """Intersect the ``i``-th box with the ``i``-th box of another table."""
        row, column = np.maximum(self.row, other.row), np.maximum(self.column, other.column)
        table = self.table.copy()
        table[:, ROW], table[:, COLUMN] = row, column
        table[:, HEIGHT] = np.maximum(np.minimum(self.bottom, other.bottom) - row, 0)
        table[:, WIDTH] = np.maximum(np.minimum(self.right, other.right) - column, 0)
        # storage stays where it is: the part begins further on in the same tensor
        table[:, OFFSET] += (row - self.row) * self.stride + column - self.column
        return Boxes(table)

    @property
    def weights(self) -> npt.NDArray[np.uint64]:
        """Sums by which boxes cover a matrix or not; see :func:`weights_of`."""
        low = np.stack([self.row, self.column], axis=1)
        return weights_of(low, np.stack([self.bottom, self.right], axis=1))

    def held(self, world_size: int) -> Int64Array:
        """Return the number of elements on each rank, int64 ``(world_size,)``."""
        # sums in float64 are exact up to 2^53
        return np.bincount(self.rank, self.area, world_size).astype(np.int64)

    @property
    def bottom(self) -> Int64Array:
        """One past the last row."""
        return self.row + self.height

    @property
    def right(self) -> Int64Array:
        """One past the last column."""
        return self.column + self.width

    @property
    def area(self) -> Int64Array:
        """Number of elements."""
        return self.height * self.width

    @property
    def extent(self) -> Int64Array:
        """One past the last storage offset."""
        return self.offset + (self.height - 1) * self.stride + self.width


class Box(NamedTuple):
    """A box of a tensor of any number of dimensions, which belongs to no rank."""

    offset: tuple[int, ...]  # index of its first element
    shape: tuple[int, ...]

    def clip(self, other: "Box") -> "Box | None":
        """Return the part that is in another box; None if there is none."""
        low = tuple(map(max, self.offset, other.offset))
        high = map(min, self._stop(), other._stop())
        shape = tuple(map(operator.sub, high, low))
        return Box(low, shape) if min(shape, default=1) > 0 else None

    def _stop(self) -> Iterator[int]:
        return map(operator.add, self.offset, self.shape)


def cut(sizes: Sequence[int], strides: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a strided view that cover a range of its storage.

    ``strides`` are descending, each at least the extent of all following dimensions. ``start`` and
    ``stop`` count storage elements, as strides do.
    """
    if 0 in sizes or stop <= 0:
        return
    if not sizes:
        if start <= 0:
            yield Box((), ())
        return
    (size, *inner_sizes), (stride, *inner_strides) = sizes, strides
    # from the first to the last element of a row; between rows there may be gaps
    extent = 1 + sum((n - 1) * s for n, s in zip(inner_sizes, inner_strides, strict=True))
    # rows of which the range has any element, and those that it covers completely
    touched = max(0, (start - extent) // stride + 1), min(size, -(-stop // stride))
    whole = max(touched[0], -(-start // stride)), min(touched[1], (stop - extent) // stride + 1)
    if whole[0] < whole[1]:
        yield Box((whole[0], *(0 for _ in inner_sizes)), (whole[1] - whole[0], *inner_sizes))
    else:
        whole = touched[1], touched[1]
    for row in (*range(touched[0], whole[0]), *range(whole[1], touched[1])):
        before = row * stride
        for offset, lengths in cut(inner_sizes, inner_strides, start - before, stop - before):
            yield Box((row, *offset), (1, *lengths))


def ragged_arange(counts: Int64Array) -> Int64Array:
    """Return ``0 .. counts[0]-1, 0 .. counts[1]-1, ...`` in one array."""
    return np.arange(counts.sum(), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)


def matching(left: Int64Array, right: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the index pairs ``(i, j)`` with ``left[i] == right[j]``, ordered by ``(i, j)``."""
    order = np.argsort(right, kind="stable")
    # a sorted merge, since a comparison of all pairs would take memory quadratic in the boxes
    keys = right[order]
    first = np.searchsorted(keys, left, "left")
    counts = np.searchsorted(keys, left, "right") - first
    i = np.repeat(np.arange(len(left), dtype=np.int64), counts)
    return i, order[np.repeat(first, counts) + ragged_arange(counts)]
