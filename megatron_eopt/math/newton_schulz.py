"""The standard Newton-Schulz iteration and the normalisation before it.

Shapes: a *wide* matrix is ``(m, n)`` or ``(batch, m, n)`` with ``m <= n``; callers transpose first,
so that the Gram matrix is the small one. A matrix whose memory is tall stays tall (``tall=True``,
shape ``(n, m)``): the small matrices are symmetric, so only the side they multiply from changes,
while copying into the other order would cost more than a product in 16 bits. ``reduce`` sums a
tensor over the ranks that hold the other columns when the long side is cut; ``None`` means that
this rank holds all of them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_eopt.math.coefficients import Triple

ReduceT = Callable[[Tensor], Tensor]
"""Sums its argument over the ranks that share a matrix and returns the sum."""

# Squares of smaller numbers leave float32; above it the clamp hides what underflows.
_FLOAT32_SAFE_EPS = 1e-15


def normalize(x: Tensor, eps: float, dtype: torch.dtype, reduce: ReduceT | None = None) -> Tensor:
    """Divide each matrix by its Frobenius norm, or by ``eps`` where that is larger.

    Rows are summed in float32 and then combined in float64: a flat float32 sum over the millions of
    entries of a weight loses up to four digits on a CPU. Entries beyond 1e19 overflow a float32
    row and give a zero update; float64 input has no such limit.

    Args:
        x: ``(..., m, n)``, any float dtype.
        eps: Smallest divisor, positive.
        dtype: Result dtype.
        reduce: Sums the squared norms over ranks.

    Returns:
        A new contiguous tensor shaped like ``x``; every spectral norm is at most 1.
    """
    careful = x.dtype == torch.float64 or eps < _FLOAT32_SAFE_EPS
    row_dtype = torch.float64 if careful else torch.float32
    scratch = not x.is_cuda and x.dtype.itemsize == 2
    if scratch:
        # On a CPU kernels that mix dtypes are several times slower than passes that do not.
        x = x.to(torch.float32)
    # The norm over the contiguous dimension first: it is the fast one.
    inner, outer = (-1, -2) if x.stride(-1) <= x.stride(-2) else (-2, -1)
    rows = torch.linalg.vector_norm(x, dim=inner, keepdim=True, dtype=row_dtype)
    norm = torch.linalg.vector_norm(rows, dim=outer, keepdim=True, dtype=torch.float64)
    if reduce is not None:
        norm = reduce(norm.square_()).sqrt_()
    factor = norm.clamp_(min=eps).reciprocal_()
    if x.dtype != torch.float64:
        factor = factor.to(torch.float32)
    # Contiguous: products that write into a transposed bfloat16 batch leave the vendor's library on
    # a CPU and take a thousand times longer.
    if x.is_cuda:
        return torch.mul(x, factor, out=torch.empty(x.shape, dtype=dtype, device=x.device))
    product = x.mul_(factor) if scratch else x * factor
    return product.to(dtype).contiguous()


def multiply_add(
    add: Tensor,
    left: Tensor,
    right: Tensor,
    *,
    beta: float,
    alpha: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``beta * add + alpha * left @ right`` for 2-D or 3-D operands, written to ``out``."""
    if left.ndim == 2:
        return torch.addmm(add, left, right, beta=beta, alpha=alpha, out=out)
    return torch.baddbmm(add, left, right, beta=beta, alpha=alpha, out=out)


def multiply_long(
    small: Tensor, x: Tensor, *, beta: float, tall: bool, out: Tensor | None = None
) -> Tensor:
    """Return ``beta X + S X`` for a symmetric ``S``; ``beta X + X S`` if ``x`` holds transposes."""
    left, right = (x, small) if tall else (small, x)
    return multiply_add(x, left, right, beta=beta, out=out)


def iterate_standard(
    x: Tensor, triples: Sequence[Triple], reduce: ReduceT | None = None, *, tall: bool = False
) -> Tensor:
    """Run ``X <- a X + (b A + c A^2) X`` with ``A = X X^T`` once per triple.

    Args:
        x: Normalised wide matrices, ``(m, n)`` or ``(batch, m, n)``; their transposes if ``tall``;
            overwritten.
        triples: One ``(a, b, c)`` per step.
        reduce: Sums the Gram matrix over the ranks that share the long side, one call per step.
        tall: Whether ``x`` holds transposes.

    Returns:
        The last iterate, shaped like ``x``. ``len(triples) * (4 n / m + 2) m^3`` FLOPs a matrix.
    """
    m = x.shape[-1] if tall else x.shape[-2]
    square = x.new_empty((*x.shape[:-2], m, m))
    polynomial = torch.empty_like(square)
    spare = torch.empty_like(x)
    for a, b, c in triples:
        wide = x.mT if tall else x
        torch.matmul(wide, wide.mT, out=square)
        if reduce is not None:
            square = reduce(square)
        multiply_add(square, square, square, beta=b, alpha=c, out=polynomial)
        multiply_long(polynomial, x, beta=a, tall=tall, out=spare)
        x, spare = spare, x
    return x
