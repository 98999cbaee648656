"""Products whose result is symmetric: a CPU computes about half of them.

Note [Symmetric products]
    ``X X^T``, polynomials of it and products of such are symmetric. Cut into four blocks, a product
    needs three, of which two are such products again; the fourth is a copy. With ``d`` cuts
    ``(1 + 2^-d) / 2`` of the operations are left, in ``2^(d + 1) - 1`` smaller products. How small
    they may be was measured in float32 with all cores busy: from :data:`_SMALLEST` multiply-adds
    on, they run about as fast as large ones. GPUs have kernels of their own (back end ``syrk``),
    and want products as large as they get.
"""

from torch import Tensor

from megatron_eopt.math.products import multiply_add, on_a_cpu, widened

_SMALLEST = 1 << 23
"""Multiply-adds of a block in float32, from which on cutting pays."""

_SMALLEST_16_BIT = 1 << 26
"""The same where products are an order faster, and copies are not."""

_MOST_CUTS = 3


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
    cuts = _cuts(left)
    if cuts == 0:
        return multiply_add(left, right.mT, add, beta=beta, alpha=alpha, out=out)
    if out is None:
        out = left.new_empty((*left.shape[:-1], left.shape[-2]))
    _lower_blocks(left, right, add, (beta, alpha), out, cuts)
    return out


def _cuts(left: Tensor) -> int:
    """Return how often to cut; see Note [Symmetric products]."""
    m, n = left.shape[-2:]
    if not on_a_cpu(left):
        return 0
    smallest = _SMALLEST_16_BIT if left.dtype.itemsize == 2 else _SMALLEST
    cuts = 0
    while cuts < _MOST_CUTS and m % 2 == 0 and (m // 2) ** 2 * n >= smallest:
        m, cuts = m // 2, cuts + 1
    return cuts


def _lower_blocks(
    left: Tensor,
    right: Tensor,
    add: Tensor | None,
    factors: tuple[float, float],
    out: Tensor,
    cuts: int,
) -> None:
    """Compute the diagonal blocks, which are symmetric, and the lower one; copy that."""
    if cuts == 0:
        beta, alpha = factors
        # a vendor's library takes strided results of float32 as they are, others by themselves
        strided = out.dtype.itemsize > 2
        product = multiply_add(
            left, right.mT, add, beta=beta, alpha=alpha, out=out if strided else None
        )
        if not strided:
            out.copy_(product)
        return
    half = left.shape[-2] // 2
    low, high = slice(0, half), slice(half, None)
    for rows, columns, again in ((low, low, cuts - 1), (high, high, cuts - 1), (high, low, 0)):
        part = None if add is None else add[..., rows, columns]
        block = out[..., rows, columns]
        _lower_blocks(left[..., rows, :], right[..., columns, :], part, factors, block, again)
    out[..., low, high].copy_(out[..., high, low].mT)
