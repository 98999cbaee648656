"""Map the rows of a rank's local weight to rows of logical matrices.

All functions are pure functions of (split, tensor-parallel size, rank, partition dimension). They
need no tensor and no process group, so one process can plan for thousands of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import Int64Array
from megatron_eopt.matrices.split import Split


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Runs of consecutive rows of one logical matrix that a rank holds.

    Runs are in the order of the rank's local weight, do not overlap, and are as long as possible.
    There are no runs if the rank holds no row.
    """

    local: Int64Array  # first local row of each run, experts one below another; int64 ``(n,)``
    logical: Int64Array  # first row of each run in the logical matrix; int64 ``(n,)``
    length: Int64Array  # number of rows of each run; int64 ``(n,)``
    first_col: int  # logical column of the local weight's column 0
    held_cols: int  # columns of the local weight
    cols: int  # columns of the logical matrix

    def triples(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(local_start_row, logical_start_row, n_rows)`` of each run."""
        return zip(self.local.tolist(), self.logical.tolist(), self.length.tolist(), strict=True)


def local_shape(split: Split, tp_size: int = 1, partition_dim: int = -1) -> tuple[int, ...]:
    """Return the shape of one rank's local weight.

    ``partition_dim`` is the dimension that tensor parallelism cuts: 0 for rows, 1 for columns, -1
    for none. The expert dimension of ``(experts, rows, cols)`` does not count.

    Raises:
        ConfigurationError: If the dimension cannot be divided evenly.
    """
    if partition_dim == -1:
        return split.shape
    cut = split.rows if partition_dim == 0 else split.cols
    # sections cut outputs; a transposed weight's rows are inputs
    in_sections = partition_dim == 0 and not split.transposed
    sizes = [section.rows for section in split.sections] if in_sections else [cut]
    if any(size % tp_size for size in sizes):
        what = "rows" if partition_dim == 0 else "columns"
        what += f" of every section ({split.describe()})" if in_sections else ""
        rule = f"must divide the {what} of a weight of shape {split.shape}"
        raise ConfigurationError("tp_size", tp_size, rule, "Choose another tensor-parallel size")
    shape = list(split.shape)
    # counted from the end, because experts come first
    shape[partition_dim - 2] //= tp_size
    return tuple(shape)


@lru_cache(maxsize=4096)
def matrix_rows(
    split: Split, tp_size: int = 1, tp_rank: int = 0, partition_dim: int = -1
) -> tuple[RowRuns, ...]:
    """Return the rows of each logical matrix that one tensor-parallel rank holds.

    ``partition_dim`` is that of :func:`local_shape`; with -1, every rank holds all rows. The split
    must not be transposed.

    Returns:
        One entry for each of :attr:`Split.matrices`.

    Raises:
        ConfigurationError: If the dimension cannot be divided evenly.
    """
    height, width = local_shape(split, tp_size, partition_dim)[-2:]
    pieces, rank = (tp_size, tp_rank) if partition_dim == 0 else (1, 0)
    first_col = tp_rank * width if partition_dim == 1 else 0
    matrices: list[RowRuns] = []
    base = 0  # first row of the section in an expert's local weight
    for section in split.sections:
        held = section.rows // pieces
        # local row of each row of the section, for every expert; -1 for rows of other ranks
        local = np.full((split.experts, section.rows), -1, np.int64)
        slab = base + np.arange(held) + height * np.arange(split.experts)[:, None]
        local[:, rank * held : (rank + 1) * held] = slab
        blocks = local.reshape(split.experts, section.blocks, section.period)
        offset = 0
        for field in section.fields:
            # the field's rows of all experts and blocks, one below another: that is its part; cut
            # into units, it is a stack of matrices
            stack = blocks[..., offset : offset + field.rows]
            stack = stack.reshape(-1, field.unit or field.rows * section.blocks)
            matrices += [RowRuns(*_runs(rows), first_col, width, split.cols) for rows in stack]
            offset += field.rows
        base += held
    return tuple(matrices)


def matrix_columns(split: Split) -> list[list[tuple[int, int]]]:
    """Return ``(start, count)`` of the column runs of each matrix of a transposed split.

    There is one entry for each matrix of :attr:`Split.matrices`, as if there were one expert.
    """
    matrices, base = [], 0
    for section in split.sections:
        columns = base + np.arange(section.rows).reshape(section.blocks, section.period)
        offset = 0
        for field in section.fields:
            mine = columns[:, offset : offset + field.rows].reshape(-1)
            for some in mine.reshape(-1, field.unit or len(mine)):
                first, _, length = _runs(some)
                matrices.append(list(zip(first.tolist(), length.tolist(), strict=True)))
            offset += field.rows
        base += section.rows
    return matrices


def _runs(local: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return the runs of the held rows: first local rows, first logical rows, lengths."""
    logical = np.flatnonzero(local >= 0)
    local = local[logical]
    # with -2 before it, the first row always begins a run
    new = (np.diff(local, prepend=-2) != 1) | (np.diff(logical, prepend=-2) != 1)
    first = np.flatnonzero(new)
    return local[first], logical[first], np.diff(first, append=len(local))
