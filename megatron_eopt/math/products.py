"""Matrix products on a GPU that compute half of symmetric results, and finish them by themselves.

A result is ``alpha left right + beta add + gamma left + diagonal I``. The kernel adds all terms in
float32 before it rounds, so that none is copied or costs another pass. Operands have 16 bits.

Three ways lead to a symmetric result: the kernel of the package quack, if it is installed and
supports the GPU; our own Triton kernel; and, where :func:`serves` is false, the whole product by
torch. See :func:`megatron_eopt.math.newton_schulz.symmetric`. Our own result is symmetric to the
bit, quack's is so up to rounding.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.address import address_of
from megatron_eopt.base.kernels import Family

_WIDE = 16  # multiples of it in sizes, strides and bytes of addresses let Triton load 16 bytes


def has_matrix_units(device: torch.device) -> bool:
    """Return whether a GPU multiplies 16-bit matrices as Triton compiles it; a T4 does not."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def suits_quack(device: torch.device) -> bool:
    """Return whether quack has symmetric kernels for a device; an MI300 also says 9.4."""
    is_nvidias = torch.version.hip is None
    return is_nvidias and torch.cuda.get_device_capability(device)[0] in (9, 10)


KERNELS = Family("symmetric products", has_matrix_units)
QUACK = Family(
    "symmetric products in quack",
    lambda device: find_spec("quack") is not None and suits_quack(device),
)

_library: Any = torch.library.Library("megatron_eopt", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "multiply(Tensor left, Tensor right, Tensor? add, float alpha, float beta, float gamma, "
    "float diagonal, bool symmetric, Tensor(a!) out) -> ()"
)


def serves(matrix: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether the kernels support products of a matrix, or of its copy in a ``dtype``.

    Others are left to torch: with scalar loads, kernels would spill registers.
    """
    if (dtype or matrix.dtype).itemsize != 2 or not KERNELS.runs(matrix):
        return False
    rows, columns = matrix.shape[-2:]
    is_wide = matrix.numel() > 0 and rows % _WIDE == 0 and columns % _WIDE == 0
    return is_wide and (dtype is not None or _is_aligned(matrix, _WIDE))


def _is_aligned(tensor: Tensor, multiple: int) -> bool:
    """Return whether a tensor begins at 16 bytes, and its strides are 1 or such multiples."""
    of_strides = all(stride == 1 or stride % multiple == 0 for stride in tensor.stride())
    return of_strides and address_of(tensor)[1] % 16 == 0


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
    if symmetric and not gamma and _quack_serves(left, right, add, out):
        multiply_by_quack(left, right, add, (alpha, beta, diagonal), out)
    else:
        multiply_by_triton(left, right, add, (alpha, beta, gamma, diagonal), symmetric, out)


def multiply_by_triton(
    left: Tensor,
    right: Tensor,
    add: Tensor | None,
    numbers: tuple[float, float, float, float],
    symmetric: bool,
    out: Tensor,
) -> None:
    """Do what :func:`multiply` does, by our own kernel."""
    stacks = [t if t is None or t.ndim == 3 else t.unsqueeze(0) for t in (left, right, add, out)]
    module = "megatron_eopt.math.triton_products"
    KERNELS.call(out, module, "launch", *stacks, numbers, symmetric)


def multiply_by_quack(
    left: Tensor,
    right: Tensor,
    add: Tensor | None,
    numbers: tuple[float, float, float],
    out: Tensor,
) -> None:
    """Do what :func:`multiply` does for a symmetric result without ``gamma``, by quack's kernel."""
    alpha, beta, diagonal = numbers
    given = (left, right, out, add)
    QUACK.call(out, "quack.gemm_interface", "gemm_symmetric_out", *given, alpha=alpha, beta=beta)
    # our kernel adds it by itself, quack's does not
    if diagonal:
        out.diagonal(0, -2, -1).add_(diagonal)


def _quack_serves(*operands: Tensor | None) -> bool:
    given = [operand for operand in operands if operand is not None]
    return QUACK.runs(given[0]) and all(
        operand.ndim > 1 and _is_aligned(operand, 8) for operand in given
    )


def flops_of_multiply(left: Tensor, right: Tensor, *args: Any, **_: Any) -> int:
    """Return the operations of :func:`multiply` for entries that are computed, not mirrored.

    Who counts operations registers this as torch's formula (``torch.utils.flop_counter``). It is
    not registered here, since that module imports Triton.
    """
    m, n, symmetric = left.shape[-2], right.shape[-1], args[5]
    return left.numel() * (m + 1 if symmetric else 2 * n)


_library.impl("multiply", _multiply, "CompositeExplicitAutograd")
torch.library.register_fake("megatron_eopt::multiply", lambda *_: None, lib=_library)
