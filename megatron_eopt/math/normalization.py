"""The division by norms before an iteration."""

import torch
from torch import Tensor

from megatron_eopt.math.newton_schulz import ReduceT

# Squares of smaller numbers leave float32; above it the clamp hides what underflows.
_FLOAT32_SAFE_EPS = 1e-15


def normalize(
    x: Tensor,
    eps: float,
    dtype: torch.dtype,
    reduce: ReduceT | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Divide each matrix by its Frobenius norm, or by ``eps`` where that is larger.

    Rows are summed in float32 and then combined in float64: a flat float32 sum over the millions of
    entries of a weight loses up to four digits. The norm of a row beyond 1.8e19 overflows and gives
    a zero update; float64 input has no such limit.

    Returns:
        A contiguous tensor of this ``dtype``, shaped like ``x``, ``(..., m, n)`` of any float
        dtype; every spectral norm is at most 1. It is new, or ``out``, which is contiguous, of this
        dtype, and may be ``x``.
    """
    careful = x.dtype == torch.float64 or eps < _FLOAT32_SAFE_EPS
    # The norm over the contiguous dimension first: it is the fast one.
    rows = torch.linalg.vector_norm(
        x if x.stride(-1) <= x.stride(-2) else x.mT,
        dim=-1,
        dtype=torch.float64 if careful else torch.float32,
    )
    norm = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    if reduce is not None:
        norm = reduce(norm.square_()).sqrt_()
    factor = norm.clamp_(min=eps).reciprocal_()
    if x.dtype != torch.float64:
        factor = factor.to(torch.float32)
    if out is None:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.mul(x, factor[..., None, None], out=out)
