"""Which rows of a rank's storage are which rows of which logical matrix.

Pure functions of (split, tensor-parallel size, rank, cut dimension). Everything here is about the
parameter's shape: no tensor and no process group is needed, so a plan for 4,096 ranks can be
computed on one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.matrices.split import Section, Split

type Int64Array = npt.NDArray[np.int64]
# rows of three: start in the rank's rows, start in the part's rows, number of rows
type _Table = Int64Array


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Runs of consecutive rows that a rank holds of one part or one logical matrix.

    Runs are ordered by their place in the rank's storage, do not overlap and are as long as they
    can be; there is none if the rank holds no row.
    """

    # first row of each run in the rank's local weight, the experts of a 3-D weight laid below one
    # another; int64 ``(n,)``, as the next two
    local: Int64Array
    # first row of each run in the logical matrix (of :func:`part_rows`: in the stack of matrices
    # laid below one another)
    logical: Int64Array
    length: Int64Array  # number of rows of each run
    first_col: int  # the logical column that is the rank's column 0
    held_cols: int  # columns that the rank holds, the width of its local weight
    cols: int  # columns of the logical matrix

    @property
    def rows(self) -> int:
        """Number of rows held."""
        return int(self.length.sum())

    def triples(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(local_start_row, logical_start_row, n_rows)`` of each run."""
        return zip(self.local.tolist(), self.logical.tolist(), self.length.tolist(), strict=True)


def local_shape(split: Split, tp_size: int = 1, partition_dim: int = -1) -> tuple[int, ...]:
    """Return the shape of one rank's weight.

    ``partition_dim`` says what tensor parallelism cuts: 0 the rows, 1 the columns, -1 nothing. The
    leading dimension of a ``(experts, rows, cols)`` weight does not count.

    Raises:
        ConfigurationError: If the cut is none of these, or not even.
    """
    if partition_dim not in (-1, 0, 1):
        rule = "must be 0 (rows cut), 1 (columns cut) or -1 (not cut)"
        raise ConfigurationError("partition_dim", partition_dim, rule, "Give one of these")
    if partition_dim == -1:
        return split.shape
    sizes = [split.cols] if partition_dim == 1 else [section.rows for section in split.sections]
    if tp_size < 1 or any(size % tp_size for size in sizes):
        what = "columns" if partition_dim == 1 else f"rows of every section of {split.describe()}"
        rule = f"must divide the {what} of {split.shape}"
        raise ConfigurationError("tp_size", tp_size, rule, "Choose another tensor-parallel size")
    shape = list(split.shape)
    shape[partition_dim - 2] //= tp_size
    return tuple(shape)


def check_fits(
    name: str,
    shape: tuple[int, ...],
    split: Split,
    tp_size: int = 1,
    partition_dim: int = -1,
) -> None:
    """Raise unless a weight of this name and local shape is what the split describes.

    Raises:
        ConfigurationError: If it is not, with the name, the shape and the expected sum.
    """
    expected = local_shape(split, tp_size, partition_dim)
    if tuple(shape) == expected:
        return
    cut = "" if partition_dim == -1 else f", dimension {partition_dim} cut over {tp_size} ranks"
    raise ConfigurationError(
        name,
        tuple(shape),
        f"must have the shape {expected} of the {split.kind} split {split.describe()}, "
        f"{split.rows} rows in all{cut}",
        "Declare this weight's own split, or leave this kind of split off",
    )


@lru_cache(maxsize=4096)
def part_rows(
    split: Split, tp_size: int = 1, tp_rank: int = 0, partition_dim: int = -1
) -> tuple[RowRuns, ...]:
    """Return the rows that one rank of a tensor-parallel group holds of each part.

    ``partition_dim`` as in :func:`local_shape`; where nothing is cut every rank holds all.

    Returns:
        One entry per :attr:`Split.parts`; ``logical`` counts rows of the part's stack, in which
        matrix ``i`` is rows ``i * part.shape[0]`` and following.

    Raises:
        ConfigurationError: If the cut is not even or the rank is outside the group.
    """
    held = local_shape(split, tp_size, partition_dim)
    if partition_dim != -1 and not 0 <= tp_rank < tp_size:
        rule = f"must be at least 0 and below tp_size={tp_size}"
        raise ConfigurationError("tp_rank", tp_rank, rule, "Give the rank in the group")
    pieces, rank = (tp_size, tp_rank) if partition_dim == 0 else (1, 0)
    first_col = tp_rank * held[-1] if partition_dim == 1 else 0
    tables: list[_Table] = []
    base = 0
    for section in split.sections:
        rows = section.rows // pieces
        tables += _section_tables(section, rank * rows, rows, base)
        base += rows
    return tuple(
        _freeze(
            _all_experts(table, split.experts, held[-2], part.count, part.shape[0]),
            first_col,
            held[-1],
            split.cols,
        )
        for table, part in zip(tables, split.parts, strict=True)
    )


@lru_cache(maxsize=4096)
def matrix_rows(
    split: Split, tp_size: int = 1, tp_rank: int = 0, partition_dim: int = -1
) -> tuple[RowRuns, ...]:
    """Return the same of each of :attr:`Split.matrices`; ``logical`` counts rows of that matrix."""
    matrices: list[RowRuns] = []
    for runs, part in zip(
        part_rows(split, tp_size, tp_rank, partition_dim), split.parts, strict=True
    ):
        table = np.stack([runs.local, runs.logical, runs.length])
        rows = part.shape[0]
        cut = _cut_at_multiples(table, rows)
        owner = cut[1] // rows
        cut[1] -= owner * rows
        # runs of one part lie in the same order in storage and in the stack, so owners ascend
        bounds = np.searchsorted(owner, np.arange(part.count + 1))
        matrices += [
            _freeze(cut[:, first:last], runs.first_col, runs.held_cols, runs.cols)
            for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        ]
    return tuple(matrices)


def _section_tables(section: Section, start: int, rows: int, base: int) -> list[_Table]:
    """Intersect each field with a slab of the section, whose first row is ``base`` in storage."""
    tables = []
    period = section.period
    block = np.arange(start // period, -(-(start + rows) // period), dtype=np.int64)
    offset = 0
    for field in section.fields:
        first = block * period + offset
        low = np.maximum(first, start)
        length = np.minimum(first + field.rows, start + rows) - low
        table = np.stack([base + low - start, block * field.rows + low - first, length])
        tables.append(_join(table[:, length > 0]))
        offset += field.rows
    return tables


def _all_experts(table: _Table, experts: int, held: int, count: int, rows: int) -> _Table:
    """Repeat one expert's runs for all of them, each below the one before."""
    if experts == 1:
        return table
    expert = np.arange(experts, dtype=np.int64)[None, :, None]
    step = np.array([held, count // experts * rows, 0], dtype=np.int64)[:, None, None]
    return _join((table[:, None, :] + expert * step).reshape(3, -1))


def _join(table: _Table) -> _Table:
    """Join neighbours that follow one another on both sides."""
    if table.shape[1] < 2:
        return table
    local, logical, length = table
    new = (local[1:] != local[:-1] + length[:-1]) | (logical[1:] != logical[:-1] + length[:-1])
    first = np.flatnonzero(np.concatenate([[True], new]))
    return np.stack([local[first], logical[first], np.add.reduceat(length, first)])


def _cut_at_multiples(table: _Table, rows: int) -> _Table:
    """Cut runs where the logical row is a multiple of ``rows``."""
    local, logical, length = table
    pieces = (logical + length - 1) // rows - logical // rows + 1
    run = np.repeat(np.arange(len(length)), pieces)
    nth = np.arange(len(run), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = np.maximum(logical[run], (logical[run] // rows + nth) * rows)
    last = np.minimum(logical[run] + length[run], (logical[run] // rows + nth + 1) * rows)
    return np.stack([local[run] + first - logical[run], first, last - first])


def _freeze(table: _Table, first_col: int, held_cols: int, cols: int) -> RowRuns:
    """Wrap a table; read-only, because results are cached and shared."""
    local, logical, length = (np.ascontiguousarray(row) for row in table)
    for row in (local, logical, length):
        row.flags.writeable = False
    return RowRuns(local, logical, length, first_col, held_cols, cols)
