"""Matrix products on a GPU that compute half of symmetric results, and finish them by themselves.

A result is ``alpha left right + beta add + gamma left + diagonal I``. The kernel adds all terms in
float32 before it rounds, so that none is copied or costs another pass. Operands have 16 bits.

Three ways lead to a symmetric result: the kernel of the package quack, if it is installed and
supports the GPU; our own Triton kernel; and, where :func:`serves` is false, the whole product by
torch. See :func:`megatron_eopt.math.newton_schulz.symmetric`.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from megatron_eopt.base import gpu

_QUACK_SERVES = (9, 10)  # major compute capabilities with symmetric kernels
_ALIGNED = 8  # 16-bit numbers per 16 bytes, of which its strides must be multiples

_library: Any = torch.library.Library("megatron_eopt", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "multiply(Tensor left, Tensor right, Tensor? add, float alpha, float beta, float gamma, "
    "float diagonal, bool symmetric, Tensor(a!) out) -> ()"
)


def serves(matrix: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether the kernels support products of a matrix, once it has this ``dtype``."""
    is_16_bit = (dtype or matrix.dtype).itemsize == 2
    return is_16_bit and gpu.runs_kernels(matrix) and matrix.numel() > 0


def multiply(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    add: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 0.0,
    diagonal: float = 0.0,
    symmetric: bool = False,
) -> Tensor:
    """Write ``alpha left right + beta add + gamma left + diagonal I`` to ``out`` and return it.

    Operands are ``(m, k)`` and ``(k, n)``, or batches of them; with ``gamma``, all are square. With
    ``symmetric``, the result is known to be symmetric, and only its lower triangle is computed.
    """
    numbers = (alpha, beta, gamma, diagonal)
    torch.ops.megatron_eopt.multiply(left, right, add, *numbers, symmetric, out)
    return out


def _multiply(
    left: Tensor,
    right: Tensor,
    add: Tensor | None,
    alpha: float,
    beta: float,
    gamma: float,
    diagonal: float,
    symmetric: bool,
    out: Tensor,
) -> None:
    # quack's kernel has one addend
    if symmetric and not gamma and _quack_serves(left, right, out):
        quack = import_module("quack.gemm_interface")
        quack.gemm_symmetric_out(left, right, out, add, alpha=alpha, beta=beta)
        # our kernel adds it by itself, quack's does not
        if diagonal:
            out.diagonal(0, -2, -1).add_(diagonal)
        return
    stacks = [t if t is None or t.ndim == 3 else t.unsqueeze(0) for t in (left, right, add, out)]
    numbers = (alpha, beta, gamma, diagonal)
    gpu.call("megatron_eopt.math.triton_products", "launch", out, *stacks, numbers, symmetric)


def _quack_serves(left: Tensor, right: Tensor, out: Tensor) -> bool:
    return (
        _is_on_gpu(left)
        and _has_quack(left.device)
        and not any(size % _ALIGNED for t in (left, right, out) for size in t.shape[-2:])
    )


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


@cache
def _has_quack(device: torch.device) -> bool:
    is_there = find_spec("quack") is not None
    return is_there and torch.cuda.get_device_capability(device)[0] in _QUACK_SERVES


@register_flop_formula(torch.ops.megatron_eopt.multiply, get_raw=True)  # type: ignore[untyped-decorator]
def _flops(left: Tensor, right: Tensor, *args: Any, **_: Any) -> int:
    """Return the operations for the entries that are computed, not mirrored."""
    m, n, symmetric = left.shape[-2], right.shape[-1], args[5]
    return left.numel() * (m + 1 if symmetric else 2 * n)


_library.impl("multiply", _multiply, "CompositeExplicitAutograd")
torch.library.register_fake("megatron_eopt::multiply", lambda *_: None, lib=_library)
