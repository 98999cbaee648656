"""Logical matrices: what a fused parameter consists of, and which rows each rank holds.

Whoever describes another kind of fused weight reads no other room; ``routing`` finds such weights.
"""

from megatron_eopt.base import declared as _declared  # noqa: F401  declarations outlive sharding
from megatron_eopt.matrices.rows import RowRuns, local_shape, matrix_columns, matrix_rows
from megatron_eopt.matrices.split import (
    Field,
    LogicalMatrix,
    Part,
    Section,
    Split,
    SplitT,
    checked_shape,
    gated,
    per_head,
    periodic,
    qkv,
    side_by_side,
    transposed,
    whole,
)

__all__ = [
    "Field",
    "LogicalMatrix",
    "Part",
    "RowRuns",
    "Section",
    "Split",
    "SplitT",
    "checked_shape",
    "gated",
    "local_shape",
    "matrix_columns",
    "matrix_rows",
    "per_head",
    "periodic",
    "qkv",
    "side_by_side",
    "transposed",
    "whole",
]
