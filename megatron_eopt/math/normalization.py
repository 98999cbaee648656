"""The division by norms before an iteration.

Note [Rows]
    A flat float32 sum over the millions of entries of a weight loses up to four digits on a CPU, so
    rows are summed in float32 and then combined in float64. In 16 bits a CPU does small matrices in
    one pass of a fused kernel instead, whose flat sum was off by at most 4e-4: a tenth of what
    rounding the quotient to bfloat16 may change.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.products import on_a_cpu
from megatron_eopt.math.scratch import converted, scratch

# Squares of smaller numbers leave float32; above it the clamp hides what underflows.
_FLOAT32_SAFE_EPS = 1e-15

# Entries that a thread takes: half of a core's second-level cache in float32.
_WIDENED_AT_ONCE = 1 << 18

# Entries of the largest matrix whose squares are summed in float32 at once: 4 MiB in 16 bits.
_SUMMED_AT_ONCE = 1 << 21


def normalize(
    x: Tensor,
    eps: float,
    dtype: torch.dtype,
    reduce: ReduceT | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Divide each matrix by its Frobenius norm, or by ``eps`` where that is larger.

    A norm beyond 1.8e19 overflows in float32 and gives a zero update: of a row, or of the matrix
    where one pass takes all of it. float64 input has no such limit.

    Returns:
        A contiguous tensor of this ``dtype``, shaped like ``x``, ``(..., m, n)`` of any float
        dtype; every spectral norm is at most 1. It is new, or ``out``, which is contiguous, of this
        dtype, and may be ``x``; or new all the same where a kernel that does so is faster.
    """
    careful = x.dtype == torch.float64 or eps < _FLOAT32_SAFE_EPS
    few = x.shape[-2] * x.shape[-1] <= _SUMMED_AT_ONCE
    if x.dtype == dtype and reduce is None and not careful and few and _mixes_slowly(x):
        # Of one matrix alone, whatever shares its batch: rounding is the same at every layout.
        return _normalized_at_once(x.contiguous(), eps)
    # The norm over the contiguous dimension first: it is the fast one.
    rows = _row_norms(
        x if x.stride(-1) <= x.stride(-2) else x.mT, torch.float64 if careful else torch.float32
    )
    norm = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    if reduce is not None:
        norm = reduce(norm.square_()).sqrt_()
    factor = norm.clamp_(min=eps).reciprocal_()
    if x.dtype != torch.float64:
        factor = factor.to(torch.float32)
    # Contiguous: products that write into a transposed bfloat16 batch leave the vendor's library on
    # a CPU and take a thousand times longer.
    if out is None:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.dtype == dtype and _mixes_slowly(x):
        # a number by itself is taken as it is, so that what is float32 is rounded but once
        each = (tensor.reshape(-1, *x.shape[-2:]) for tensor in (x, out))
        for matrix, place, number in zip(*each, factor.flatten(), strict=True):
            torch.mul(matrix, number, out=place)
        return out
    factor = factor[..., None, None]
    if x.dtype == dtype or not on_a_cpu(x):
        return torch.mul(x, factor, out=out)
    if _mixes_slowly(x):
        wide = out.copy_(x) if dtype == torch.float32 else converted(x, torch.float32)
        product = wide.mul_(factor)
    else:
        product = torch.mul(x, factor, out=scratch("widened", x.shape, x, factor.dtype))
    return out if product is out else out.copy_(product)


def _normalized_at_once(x: Tensor, eps: float) -> Tensor:
    rows = x.view(-1, x.shape[-2] * x.shape[-1])
    unit, norms = torch._weight_norm_interface(rows, rows.new_ones(len(rows), 1), 0)
    small = norms.flatten() < eps
    # a tensor of another class has no numbers to look at
    if type(rows) is Tensor and small.any():
        unit[small] = rows[small].float().mul_(1 / eps).to(x.dtype)
    return unit.view(x.shape)


def _mixes_slowly(x: Tensor) -> bool:
    """Whether kernels that mix this dtype with another are several times slower than passes."""
    return on_a_cpu(x) and x.dtype.itemsize == 2


def _row_norms(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norm of each row, on a CPU of as many widened ones as stay in a cache."""
    norms: Callable[[Tensor], Tensor] = partial(torch.linalg.vector_norm, dim=-1, dtype=dtype)
    if not _mixes_slowly(x):
        return norms(x)
    few = max(1, torch.get_num_threads() * _WIDENED_AT_ONCE // x.shape[-1])
    parts = torch.split(x.flatten(0, -2), few)
    return torch.cat([norms(converted(part, torch.float32)) for part in parts]).view(x.shape[:-1])
