"""Products whose result is symmetric: a CPU computes about half of them.

Note [Symmetric products]
    ``X X^T``, polynomials of it and products of such are symmetric. Of each panel of rows only what
    lies on and right of the diagonal is computed; the rest is its mirror image. With ``k`` panels
    ``(1 + 1 / k) / 2`` of the operations are left. How narrow panels may be was measured: in
    float32 products of 128 to 256 rows run about as fast as large ones. In 16 bits, where products
    are six times as fast and copies are not, it pays for large matrices only, and panels are
    columns, as the right operand is what the library packs. GPUs have kernels of their own (back
    end ``syrk``), and want products as large as they get.
"""

from torch import Tensor

from megatron_eopt.math.products import multiply_add, on_a_cpu, widened

_NARROWEST, _WIDEST = 128, 256
"""Rows of a panel."""

_SMALLEST = 1 << 23
"""Multiply-adds in float32 of a square of a panel's width, from which on cutting pays."""

_SMALLEST_16_BIT = 1 << 33
"""Multiply-adds of the whole product, from which on it pays in 16 bits; half of that did not."""


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
    width = _width(left)
    if width >= left.shape[-2]:
        return multiply_add(left, right.mT, add, beta=beta, alpha=alpha, out=out)
    if out is None:
        out = left.new_empty((*left.shape[:-1], left.shape[-2]))
    return _by_panels(left, right, add, out, width, beta=beta, alpha=alpha)


def _width(left: Tensor) -> int:
    """Return the rows of a panel, which may be all; see Note [Symmetric products]."""
    m, n = left.shape[-2:]
    if not on_a_cpu(left):
        return m
    if left.dtype.itemsize == 2:
        return _WIDEST if m**2 * n >= _SMALLEST_16_BIT else m
    # about four panels, of rows that fill vectors
    width = min(max(m // 256 * 64, _NARROWEST), _WIDEST)
    return width if width**2 * n >= _SMALLEST else m


def _by_panels(
    left: Tensor,
    right: Tensor,
    add: Tensor | None,
    out: Tensor,
    width: int,
    **factors: float,
) -> Tensor:
    """Write the product into ``out`` panel by panel, and return it; Note [Symmetric products]."""
    # in 16 bits panels are columns, and libraries write no strided results
    by_columns = out.dtype.itemsize == 2
    upper = out.mT if by_columns else out
    for start in range(0, left.shape[-2], width):
        panel, rest, beyond = slice(start, start + width), slice(start, None), start + width
        rows, columns = (rest, panel) if by_columns else (panel, rest)
        part = None if add is None else add[..., rows, columns]
        block = upper[..., panel, rest]
        product = multiply_add(
            left[..., rows, :],
            right[..., columns, :].mT,
            part,
            out=None if by_columns else block,
            **factors,
        )
        if by_columns:
            product = block.copy_(product.mT)
        # transposed in memory first, for which there is a faster kernel
        upper[..., beyond:, panel].copy_(product[..., width:].mT.contiguous())
    return out
