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
from megatron_eopt.matrices.split import Split

type Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Runs of consecutive rows that a rank holds of one logical matrix.

    Runs are ordered by their place in the rank's storage, do not overlap and are as long as they
    can be; there is none if the rank holds no row.
    """

    # first row of each run in the rank's local weight, the experts of a 3-D weight laid below one
    # another; int64 ``(n,)``, as the next two
    local: Int64Array
    logical: Int64Array  # first row of each run in the logical matrix
    length: Int64Array  # number of rows of each run
    first_col: int  # the logical column that is the rank's column 0
    held_cols: int  # columns that the rank holds, the width of its local weight
    cols: int  # columns of the logical matrix

    def triples(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(local_start_row, logical_start_row, n_rows)`` of each run."""
        return zip(self.local.tolist(), self.logical.tolist(), self.length.tolist(), strict=True)


def local_shape(split: Split, tp_size: int = 1, partition_dim: int = -1) -> tuple[int, ...]:
    """Return the shape of one rank's weight.

    ``partition_dim`` says what tensor parallelism cuts: 0 the rows, 1 the columns, -1 nothing. The
    leading dimension of a ``(experts, rows, cols)`` weight does not count.

    Raises:
        ConfigurationError: If the cut is not even.
    """
    if partition_dim == -1:
        return split.shape
    sizes = [split.cols] if partition_dim == 1 else [section.rows for section in split.sections]
    if any(size % tp_size for size in sizes):
        what = "columns" if partition_dim == 1 else f"rows of every section of {split.describe()}"
        rule = f"must divide the {what} of {split.shape}"
        raise ConfigurationError("tp_size", tp_size, rule, "Choose another tensor-parallel size")
    shape = list(split.shape)
    shape[partition_dim - 2] //= tp_size
    return tuple(shape)


@lru_cache(maxsize=4096)
def matrix_rows(
    split: Split, tp_size: int = 1, tp_rank: int = 0, partition_dim: int = -1
) -> tuple[RowRuns, ...]:
    """Return the rows that one rank of a tensor-parallel group holds of each logical matrix.

    ``partition_dim`` as in :func:`local_shape`; where nothing is cut every rank holds all.

    Returns:
        One entry per :attr:`Split.matrices`.

    Raises:
        ConfigurationError: If the cut is not even.
    """
    height, width = local_shape(split, tp_size, partition_dim)[-2:]
    pieces, rank = (tp_size, tp_rank) if partition_dim == 0 else (1, 0)
    first_col = tp_rank * width if partition_dim == 1 else 0
    matrices: list[RowRuns] = []
    base = 0  # where the section begins in an expert's storage
    for section in split.sections:
        held = section.rows // pieces
        # in which local row each row of the section lies, for every expert; -1 where it does not
        local = np.full((split.experts, section.rows), -1, np.int64)
        slab = base + np.arange(held) + height * np.arange(split.experts)[:, None]
        local[:, rank * held : (rank + 1) * held] = slab
        blocks = local.reshape(split.experts, section.blocks, section.period)
        offset = 0
        for field in section.fields:
            stack = blocks[..., offset : offset + field.rows]
            stack = stack.reshape(-1, field.unit or field.rows * section.blocks)
            matrices += [RowRuns(*_runs(rows), first_col, width, split.cols) for rows in stack]
            offset += field.rows
        base += held
    return tuple(matrices)


def _runs(local: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return runs of the rows that are held: first local rows, first logical rows, lengths."""
    logical = np.flatnonzero(local >= 0)
    local = local[logical]
    # -2: the first row never continues a run
    new = (np.diff(local, prepend=-2) != 1) | (np.diff(logical, prepend=-2) != 1)
    first = np.flatnonzero(new)
    return local[first], logical[first], np.diff(first, append=len(local))
