"""Products of matrices.

Note [Widened products]
    Many CPUs multiply in float32 and not in 16 bits; torch then goes entry by entry, some 90 times
    slower than in float32. There 16-bit operands are widened. The product of two bfloat16 numbers
    is a float32 number, sums are float32 in either case, and the result is rounded once: it differs
    from other processors' by the order of summation alone.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


@cache
def has_instructions(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices of this dtype by instructions for it."""
    if dtype.itemsize > 2:
        return True
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    # absent where torch was built without oneDNN
    supported: Callable[[], bool] = getattr(
        torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", lambda: False
    )
    return supported()


def multiply_add(
    left: Tensor,
    right: Tensor,
    add: Tensor | None = None,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``beta * add + alpha * left @ right`` for 2-D or 3-D operands, written to ``out``.

    Without ``add`` that is nothing. See Note [Widened products].
    """
    # a tensor of another class only says what a GPU would compute
    if type(left) is Tensor and left.is_cpu and not has_instructions(left.dtype):
        wide = None if add is None else add.float()
        total = multiply_add(left.float(), right.float(), wide, beta=beta, alpha=alpha, out=wide)
        return total.to(left.dtype) if out is None else out.copy_(total)
    if add is None:
        product = torch.matmul(left, right, out=out)
        return product if alpha == 1.0 else product.mul_(alpha)
    if left.ndim == 2:
        return torch.addmm(add, left, right, beta=beta, alpha=alpha, out=out)
    return torch.baddbmm(add, left, right, beta=beta, alpha=alpha, out=out)
