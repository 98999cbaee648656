"""Products whose result is symmetric: a CPU computes about half of them.

Note [Symmetric products]
    ``X X^T``, polynomials of it and products of such are symmetric. Of each panel of rows only what
    lies on and right of the diagonal is computed; the rest is its mirror image. With ``k`` panels
    ``(1 + 1 / k) / 2`` of the operations are left. How narrow panels may be was measured: in
    float32 products of 128 to 256 rows run about as fast as large ones, and so they do in 16 bits
    where a CPU has vector instructions for them. There matrices are multiplied one by one, since
    panels of a batch would be copied first. Where a CPU multiplies tiles, products in 16 bits are
    six times as fast and copies are not, so it pays for large matrices only, and panels are
    columns. GPUs have kernels of their own (back end ``syrk``), and want products as large as they
    get.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_eopt.math.products import fused, multiplies_by_tiles, on_a_cpu, widened
from megatron_eopt.math.scratch import remembered

_NARROWEST, _WIDEST = 128, 256
"""Rows of a panel."""

_SMALLEST = 1 << 23
"""Multiply-adds of a square of a panel's width, from which on cutting pays."""

_SMALLEST_TILED = 1 << 33
"""Multiply-adds of the whole product, from which on it pays with tiles; half of that did not."""


@widened
def symmetric_product(
    left: Tensor,
    right: Tensor,
    add: Tensor | None = None,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``beta * add + alpha * left @ right^T``, which is known to be symmetric.

    Args:
        left: ``(m, n)`` or ``(batch, m, n)``.
        right: The same shape.
        add: ``(..., m, m)``, symmetric; nothing if None.
        beta: Factor on it.
        alpha: Factor on the product.
        out: Where to write, which may be ``add``; by default new.
    """
    m, n = left.shape[-2:]
    width = panel_width(m, n, left.dtype) if on_a_cpu(left) else m
    if width >= m:
        return fused(left, right.mT, add, beta=beta, alpha=alpha, out=out)
    if out is None:
        out = left.new_empty((*left.shape[:-1], m))
    one_by_one = left.ndim == 3 and taken_alone(m, n, left.dtype)
    for which in range(len(left)) if one_by_one else (...,):
        part = None if add is None else add[which]
        _fill(out[which], left[which], right[which], part, width, beta=beta, alpha=alpha)
    return out


def panel_width(m: int, n: int, dtype: torch.dtype) -> int:
    """Return the rows of a panel on a CPU, which may be all; see Note [Symmetric products]."""
    if multiplies_by_tiles(dtype):
        return _WIDEST if m**2 * n >= _SMALLEST_TILED else m
    # about four panels, of rows that fill vectors
    width = min(max(m // 256 * 64, _NARROWEST), _WIDEST)
    if dtype.itemsize > 2:
        return width if width**2 * n >= _SMALLEST else m
    # two panels save less than it takes to do without batches
    pays = width**2 * n >= _SMALLEST * torch.get_num_threads() and m > 2 * width
    return width if pays else m


def taken_alone(m: int, n: int, dtype: torch.dtype) -> bool:
    """Return whether a CPU multiplies ``(m, n)`` matrices one by one; Note [Symmetric products]."""
    by_vectors = dtype.itemsize == 2 and not multiplies_by_tiles(dtype)
    return by_vectors and panel_width(m, n, dtype) < m


def _fill(
    out: Tensor,
    left: Tensor,
    right: Tensor,
    add: Tensor | None,
    width: int,
    **factors: float,
) -> None:
    """Write the product into ``out`` panel by panel; see Note [Symmetric products]."""
    # In 16 bits libraries pack the right operand, which is smaller as a panel; but a transposed
    # left one they copy first. With tiles they write no strided results.
    narrow, tiled = out.dtype.itemsize == 2, multiplies_by_tiles(out.dtype)
    cut = _by_columns if narrow and (tiled or left.stride(-1) == 1) else _by_rows
    for one, other, part, block, beyond, image in remembered(cut, left, right, add, out, width):
        product = fused(one, other, part, out=None if tiled else block, **factors)
        if tiled:
            block.copy_(product)
        # elsewhere transposed in memory first, for which there is a faster kernel
        image.copy_(beyond if narrow and not tiled else beyond.contiguous())


class _Panel(NamedTuple):
    """Views of what makes one panel of a product."""

    left: Tensor
    right: Tensor
    add: Tensor | None
    block: Tensor  # of the result, on the diagonal and beyond
    beyond: Tensor  # what of it is mirrored, transposed
    image: Tensor  # and where to

    def transposed(self) -> "_Panel":
        """Return what makes the same panel of the transposed product."""
        left, right, add, *places = self
        return _Panel(right.mT, left.mT, None if add is None else add.mT, *(v.mT for v in places))


def _by_columns(
    left: Tensor, right: Tensor, add: Tensor | None, out: Tensor, width: int
) -> tuple[_Panel, ...]:
    """Return the panels of columns, down from the diagonal."""
    panels = []
    for start in range(0, left.shape[-2], width):
        beyond = start + width
        panel, rest = slice(start, beyond), slice(start, None)
        panels.append(
            _Panel(
                left[..., rest, :],
                right[..., panel, :].mT,
                None if add is None else add[..., rest, panel],
                out[..., rest, panel],
                out[..., beyond:, panel].mT,
                out[..., panel, beyond:],
            )
        )
    return tuple(panels)


def _by_rows(
    left: Tensor, right: Tensor, add: Tensor | None, out: Tensor, width: int
) -> tuple[_Panel, ...]:
    """Return the panels of rows, right from the diagonal."""
    there = _by_columns(right, left, None if add is None else add.mT, out.mT, width)
    return tuple(panel.transposed() for panel in there)
