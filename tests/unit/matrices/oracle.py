"""The slow, obvious answer: one row at a time, in plain Python."""

from typing import Any

import numpy as np

from megatron_eopt.matrices import RowRuns, Split


def rows_of_rank(split: Split, tp_size: int, tp_rank: int) -> list[tuple[int, int]]:
    """Return, for each local row from top to bottom, (part, row in the part's stack)."""
    held: list[tuple[int, int]] = []
    for expert in range(split.experts):
        first_part = 0
        for section in split.sections:
            rows: list[tuple[int, int]] = []
            for block in range(section.blocks):
                for number, field in enumerate(section.fields):
                    for row in range(field.rows):
                        in_expert = block * field.rows + row
                        below = expert * section.blocks * field.rows
                        rows.append((first_part + number, below + in_expert))
            piece = len(rows) // tp_size
            held += rows[tp_rank * piece : (tp_rank + 1) * piece]
            first_part += len(section.fields)
    return held


def elements(runs: RowRuns) -> tuple[Any, Any, Any]:
    """Return runs of rows as runs of elements in row-major order.

    Returns:
        ``(local_start, logical_start, length)`` in elements: one run per run of rows where the rank
        holds full rows, one per row where columns are cut.
    """
    if runs.held_cols == runs.cols:
        return runs.local * runs.cols, runs.logical * runs.cols, runs.length * runs.cols
    rows = [
        (local + row, logical + row)
        for local, logical, length in runs.triples()
        for row in range(length)
    ]
    local, logical = np.array(rows, np.int64).reshape(-1, 2).T
    length = np.full(len(rows), runs.held_cols, np.int64)
    return local * runs.held_cols, logical * runs.cols + runs.first_col, length
