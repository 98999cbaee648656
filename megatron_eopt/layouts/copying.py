"""Runs the copies of a plan on tensors, with as few calls as the device allows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_eopt.layouts.moves import Moves

__all__ = ["run_moves"]


def run_moves(
    moves: Moves, sources: Sequence[Tensor | None], sinks: Sequence[Tensor | None]
) -> None:
    """Copy every move's block; dtypes may differ.

    Args:
        moves: The copies.
        sources: Flat contiguous tensors that moves read; None where none does.
        sinks: Flat contiguous tensors that moves write.
    """
    into: list[Tensor] = []
    from_: list[Tensor] = []
    for move in moves.moves:
        read, write = sources[move.source], sinks[move.sink]
        assert read is not None
        assert write is not None
        from_.append(_block(read, move.size, move.read))
        into.append(_block(write, move.size, move.write))
    if not into:
        return
    if into[0].is_cuda:
        _copy_on_gpu(into, from_)
    else:
        torch._foreach_copy_(into, from_)


def _block(tensor: Tensor, size: tuple[int, ...], place: tuple[int, ...]) -> Tensor:
    return tensor.as_strided(size, place[:-1], tensor.storage_offset() + place[-1])


def _copy_on_gpu(into: list[Tensor], from_: list[Tensor]) -> None:
    """Fuse the runs into one kernel; one strided block among them would unfuse them all."""
    runs = [i for i, block in enumerate(into) if block.dim() == 1]
    if runs:
        torch._foreach_copy_([into[i] for i in runs], [from_[i] for i in runs])
    for sink, source in zip(into, from_, strict=True):
        if sink.dim() > 1:
            sink.copy_(source)
