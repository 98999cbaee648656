"""Taking a weight apart into its logical matrices, and putting it together again, bit for bit."""

from collections.abc import Sequence

import torch

from megatron_eopt.matrices import RowRuns, Split, check_fits, local_shape, matrix_rows

__all__ = [
    "merge_local",
    "part_views",
    "split_local",
    "split_parts",
]


def part_views(tensor: torch.Tensor, split: Split) -> list[torch.Tensor]:
    """Return the parts of an unsharded weight in place, for copying into and out of own buffers.

    Args:
        tensor: The weight, its gradient or momentum; shape ``split.shape``, any strides.
        split: Its description.

    Returns:
        One view of ``tensor`` per :attr:`Split.parts`, never a copy, of shape ``(experts, blocks,
        rows of the field, cols)``: the order of the part's rows.

    Raises:
        ConfigurationError: If the shapes differ.
    """
    check_fits("tensor", tuple(tensor.shape), split)
    stacked = tensor if tensor.dim() == 3 else tensor.unsqueeze(0)
    views = []
    base = 0
    for section in split.sections:
        held = stacked[:, base : base + section.rows]
        blocks = held.view(split.experts, section.blocks, section.period, split.cols)
        offset = 0
        for field in section.fields:
            views.append(blocks[:, :, offset : offset + field.rows])
            offset += field.rows
        base += section.rows
    return views


def split_parts(tensor: torch.Tensor, split: Split) -> list[torch.Tensor]:
    """Take an unsharded weight apart.

    Args:
        tensor: The weight, its gradient or momentum; shape ``split.shape``, any dtype.
        split: Its description.

    Returns:
        One stack of shape ``(part.count, *part.shape)`` per :attr:`Split.parts`. A stack is a view
        of ``tensor`` where strides allow it (gate and up, heads, experts), else a new tensor.

    Raises:
        ConfigurationError: If the shapes differ.
    """
    return [
        view.reshape(part.count, *part.shape)
        for view, part in zip(part_views(tensor, split), split.parts, strict=True)
    ]


def split_local(
    tensor: torch.Tensor,
    split: Split,
    tp_size: int = 1,
    tp_rank: int = 0,
    partition_dim: int = -1,
) -> list[torch.Tensor]:
    """Take one rank's weight apart into its pieces of the logical matrices.

    Args:
        tensor: The rank's weight, shape ``local_shape(split, tp_size, partition_dim)``.
        split: Description of the unsharded parameter.
        tp_size: Ranks of its tensor-parallel group.
        tp_rank: The rank in that group.
        partition_dim: The cut: 0 the rows, 1 the columns, -1 none.

    Returns:
        One tensor ``(rows held, columns held)`` per :attr:`Split.matrices`, with 0 rows where the
        rank holds nothing of a matrix; a view of ``tensor`` where the rows are consecutive.

    Raises:
        ConfigurationError: If the shapes differ.
    """
    check_fits("tensor", tuple(tensor.shape), split, tp_size, partition_dim)
    rows = tensor.reshape(-1, tensor.shape[-1])
    return [_gather(rows, runs) for runs in matrix_rows(split, tp_size, tp_rank, partition_dim)]


def merge_local(
    pieces: Sequence[torch.Tensor],
    split: Split,
    tp_size: int = 1,
    tp_rank: int = 0,
    partition_dim: int = -1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Put one rank's weight together, the inverse of :func:`split_local`.

    Args:
        pieces: One tensor per :attr:`Split.matrices`, as :func:`split_local` returns them.
        split: Description of the unsharded parameter.
        tp_size: Ranks of its tensor-parallel group.
        tp_rank: The rank in that group.
        partition_dim: The cut: 0 the rows, 1 the columns, -1 none.
        out: Where to write, contiguous; a new tensor if absent.

    Returns:
        The rank's weight, shape ``local_shape(split, tp_size, partition_dim)``.

    Raises:
        ConfigurationError: If ``out`` has another shape.
    """
    if out is None:
        out = pieces[0].new_empty(local_shape(split, tp_size, partition_dim))
    check_fits("out", tuple(out.shape), split, tp_size, partition_dim)
    rows = out.view(-1, out.shape[-1])
    table = matrix_rows(split, tp_size, tp_rank, partition_dim)
    for piece, runs in zip(pieces, table, strict=True):
        taken = 0
        for local, _, length in runs.triples():
            rows[local : local + length].copy_(piece[taken : taken + length])
            taken += length
    return out


def _gather(rows: torch.Tensor, runs: RowRuns) -> torch.Tensor:
    held = [rows[local : local + length] for local, _, length in runs.triples()]
    return held[0] if len(held) == 1 else torch.cat([rows[:0], *held])
