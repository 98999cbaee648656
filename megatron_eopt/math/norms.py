"""Division by Frobenius norms on a GPU in two kernels: the first reads, the second also writes.

The kernels are torch operators so that a dry run counts them. Triton is imported when one runs,
because it is installed only on machines with GPUs.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.kernels import Family

KERNELS = Family("norms and divisions by them")

_MODULE = "megatron_eopt.math.triton_normalize"
_MOST_PARTS = 1024  # partial sums per matrix; each block of the second kernel adds them up
_BLOCK = 4096  # elements that a program adds at once

_library: Any = torch.library.Library("megatron_eopt", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("sums_of_squares(Tensor x, int chunk) -> Tensor")
_library.define(
    "divide_by_norms(Tensor x, Tensor squares, float eps, float norm, Tensor(a!) out) -> ()"
)


def serves(x: Tensor) -> bool:
    """Return whether the kernels support a tensor."""
    return KERNELS.runs(x) and x.is_contiguous() and x.dtype != torch.float64 and x.numel() > 0


def sums_of_squares(x: Tensor) -> Tensor:
    """Return partial sums of squares ``(..., parts)`` of matrices ``(..., m, n)``, float64.

    Squares of 16-bit numbers and their sums are exact in float64 unless magnitudes differ by more
    than 1e5. So norms have the same bits, however matrices are cut into parts.
    """
    size = x.shape[-2] * x.shape[-1]
    # whole blocks, because the kernel masks what is beyond the matrix, not beyond the chunk
    chunk = -(-size // (_MOST_PARTS * _BLOCK)) * _BLOCK
    found: Tensor = torch.ops.megatron_eopt.sums_of_squares(x, max(chunk, 4 * _BLOCK))
    return found


def divide(x: Tensor, squares: Tensor, eps: float, norm: float, out: Tensor) -> None:
    """Write ``norm * x`` divided by the matrices' norms (at least ``eps``) to ``out``.

    The partial sums of squares ``(..., parts)`` are added in float64.
    """
    if squares.shape[-1] > _MOST_PARTS:
        squares = squares.sum(-1, keepdim=True, dtype=torch.float64)
    torch.ops.megatron_eopt.divide_by_norms(x, squares, eps, norm, out)


def _no_sums(x: Tensor, chunk: int) -> Tensor:
    parts = -(-x.shape[-2] * x.shape[-1] // chunk)
    return x.new_empty((*x.shape[:-2], parts), dtype=torch.float64)


def _sum(x: Tensor, chunk: int) -> Tensor:
    found = _no_sums(x, chunk)
    KERNELS.call(x, _MODULE, "launch_sums", x, found, chunk, _BLOCK)
    return found


def _divide(x: Tensor, squares: Tensor, eps: float, norm: float, out: Tensor) -> None:
    KERNELS.call(x, _MODULE, "launch_division", x, squares, eps, norm, out, _BLOCK)


# for every device, because `serves` has chosen already
_library.impl("sums_of_squares", _sum, "CompositeExplicitAutograd")
_library.impl("divide_by_norms", _divide, "CompositeExplicitAutograd")
torch.library.register_fake("megatron_eopt::sums_of_squares", _no_sums, lib=_library)
torch.library.register_fake("megatron_eopt::divide_by_norms", lambda *_: None, lib=_library)
