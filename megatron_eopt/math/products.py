"""Products of matrices, at a speed for which each processor has instructions.

Note [Widened products]
    Many CPUs multiply in float32 and not in 16 bits; torch then goes entry by entry, some 90 times
    slower than in float32. Operands are widened there instead. The product of two bfloat16 numbers
    is a float32 number, sums are float32 in either case, and the result is rounded once: it differs
    from other processors' by the order of summation alone. Memory for the wide operands and the
    wide result is the price, and a few percent of the time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, Protocol

import torch
from torch import Tensor

_like_a_gpu: ContextVar[bool] = ContextVar("_like_a_gpu", default=False)


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Let tensors that have no data, and so no GPU, be computed on as a GPU would."""
    token = _like_a_gpu.set(True)
    try:
        yield
    finally:
        _like_a_gpu.reset(token)


def is_like_a_gpu() -> bool:
    """Return whether that is so."""
    return _like_a_gpu.get()


def on_a_cpu(tensor: Tensor) -> bool:
    """Return whether a product of this tensor is computed as CPUs want it."""
    return tensor.device.type == "cpu" and not _like_a_gpu.get()


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


@cache
def multiplies_by_tiles(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies 16-bit numbers as tiles, ten times as fast as float32.

    By vector instructions it is twice as fast, so that small products cost little more than their
    operations. What is not known to do so is taken to have tiles.
    """
    # absent in older releases of torch
    known: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    by_vectors = known().get("avx512_bf16", False) and not known().get("amx_tile", False)
    return dtype.itemsize == 2 and not (dtype == torch.bfloat16 and by_vectors)


class Product(Protocol):
    """A product of matrices to which something may be added."""

    def __call__(
        self,
        left: Tensor,
        right: Tensor,
        add: Tensor | None = None,
        *,
        beta: float = 1.0,
        alpha: float = 1.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``beta * add + alpha * product``, written to ``out``."""


def widened(product: Product) -> Product:
    """Widen 16-bit matrices where there are no instructions for them; Note [Widened products]."""

    @wraps(product)
    def compute(
        left: Tensor,
        right: Tensor,
        add: Tensor | None = None,
        *,
        out: Tensor | None = None,
        **factors: float,
    ) -> Tensor:
        if not on_a_cpu(left) or has_instructions(left.dtype):
            return product(left, right, add, out=out, **factors)
        wide = left.float()
        other = wide if right is left else right.float()
        total = None if add is None else add.float()
        total = product(wide, other, total, out=total, **factors)
        return total.to(left.dtype) if out is None else out.copy_(total)

    return compute


def fused(
    left: Tensor,
    right: Tensor,
    add: Tensor | None = None,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``beta * add + alpha * left @ right`` for 2-D or 3-D operands, written to ``out``.

    Without ``add`` that is nothing. For operands that are as wide as they should be.
    """
    if add is None:
        product = torch.matmul(left, right, out=out)
        return product if alpha == 1.0 else product.mul_(alpha)
    if left.ndim == 2:
        return torch.addmm(add, left, right, beta=beta, alpha=alpha, out=out)
    return torch.baddbmm(add, left, right, beta=beta, alpha=alpha, out=out)


multiply_add = widened(fused)
