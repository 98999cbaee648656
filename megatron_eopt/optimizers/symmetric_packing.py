"""Symmetric matrices on the wire: the rows of every block of the upper triangle, nothing twice.

Blocks instead of single entries: a strip of rows is one strided copy, while picking entries by
index takes longer than sending them.
"""

import torch
from torch import Tensor

_STRIPS = 16


def pack_symmetric(square: Tensor) -> Tensor:
    """Return the upper triangle of symmetric matrices, to whole blocks of rows.

    Of ``(m, m)`` or ``(batch, m, m)``, as one dimension with :func:`packed_elements` per matrix.
    """
    strips = [square[..., top:bottom, top:].flatten() for top, bottom in _strips(square.shape[-1])]
    return torch.cat(strips)


def unpack_symmetric(packed: Tensor, square: Tensor) -> None:
    """Write what :func:`pack_symmetric` packed into both triangles of ``square``."""
    at = 0
    for top, bottom in _strips(square.shape[-1]):
        strip = square[..., top:bottom, top:]
        strip.copy_(packed[at : at + strip.numel()].view(strip.shape))
        square[..., bottom:, top:bottom].copy_(strip[..., bottom - top :].mT)
        at += strip.numel()


def packed_elements(m: int) -> int:
    """Return what a matrix of ``m`` rows takes: at most 17/32 of it for large ``m``."""
    return sum((bottom - top) * (m - top) for top, bottom in _strips(m))


def _strips(m: int) -> list[tuple[int, int]]:
    height = -(-m // _STRIPS)
    return [(top, min(top + height, m)) for top in range(0, m, height)]
