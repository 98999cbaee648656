"""Taking a weight apart into its logical matrices, and putting it together again, bit for bit."""

from collections.abc import Sequence

import torch

from megatron_eopt.matrices import RowRuns, Split, local_shape, matrix_rows


def split_local(
    tensor: torch.Tensor, split: Split, tp_size: int = 1, tp_rank: int = 0, partition_dim: int = -1
) -> list[torch.Tensor]:
    """Take one rank's weight apart into its pieces of the logical matrices."""
    assert tuple(tensor.shape) == local_shape(split, tp_size, partition_dim)
    rows = tensor.reshape(-1, tensor.shape[-1])
    return [_gather(rows, runs) for runs in matrix_rows(split, tp_size, tp_rank, partition_dim)]


def merge_local(
    pieces: Sequence[torch.Tensor],
    split: Split,
    tp_size: int = 1,
    tp_rank: int = 0,
    partition_dim: int = -1,
) -> torch.Tensor:
    """Put one rank's weight together, the inverse of :func:`split_local`."""
    out = pieces[0].new_empty(local_shape(split, tp_size, partition_dim))
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
