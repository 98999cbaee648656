"""Logical matrices: what a fused parameter is made of, and where each rank holds which rows."""

from megatron_eopt.matrices.parts import (
    check_fits,
    merge_local,
    merge_parts,
    part_views,
    split_local,
    split_parts,
)
from megatron_eopt.matrices.patterns import gated, periodic, qkv, side_by_side, whole
from megatron_eopt.matrices.runs import RowRuns, local_shape, matrix_rows, part_rows
from megatron_eopt.matrices.split import Field, LogicalMatrix, Part, Section, Split, SplitT

__all__ = [
    "Field",
    "LogicalMatrix",
    "Part",
    "RowRuns",
    "Section",
    "Split",
    "SplitT",
    "check_fits",
    "gated",
    "local_shape",
    "matrix_rows",
    "merge_local",
    "merge_parts",
    "part_rows",
    "part_views",
    "periodic",
    "qkv",
    "side_by_side",
    "split_local",
    "split_parts",
    "whole",
]
