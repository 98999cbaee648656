"""Triton kernels of :mod:`megatron_eopt.math.norms`."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_squares(x, sums, size, chunk, parts, block: tl.constexpr):
    """Sum the squares of one chunk of one matrix."""
    # not two axes of the grid, since only the first may have more than 65,535 programs
    program = tl.program_id(0).to(tl.int64)
    matrix, begin = program // parts, program % parts * chunk
    total = tl.zeros((block,), tl.float64)
    for start in range(0, chunk, block):
        places = begin + start + tl.arange(0, block)
        value = tl.load(x + matrix * size + places, mask=places < size, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + program, tl.sum(total))


@triton.jit
def _divide(x, sums, out, numbers, size, parts, widths: tl.constexpr):
    """Divide a block of a matrix by the matrix's norm; ``numbers`` are eps and the new norm."""
    blocks = tl.cdiv(size, widths[1])
    number, matrix = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    each = tl.arange(0, widths[0])
    squares = tl.load(sums + matrix * parts + each, mask=each < parts, other=0.0)
    old = tl.sqrt(tl.sum(squares.to(tl.float64)))
    # by default Triton's maximum drops nan, which would turn a broken gradient into numbers
    old = tl.maximum(old, tl.full((), numbers[0], tl.float64), propagate_nan=tl.PropagateNan.ALL)
    factor = (numbers[1] / old).to(tl.float32)
    places = number.to(tl.int64) * widths[1] + tl.arange(0, widths[1])
    mask = places < size
    value = tl.load(x + matrix * size + places, mask=mask).to(tl.float32) * factor
    tl.store(out + matrix * size + places, value.to(out.dtype.element_ty), mask=mask)


def launch_sums(x: Tensor, sums: Tensor, chunk: int, block: int) -> None:
    """Write the sums of squares of the chunks of matrices; ``sums`` has one column per chunk."""
    size = x.shape[-2] * x.shape[-1]
    parts = sums.shape[-1]
    numbers = (size, chunk, parts, block)
    _sum_squares[(sums.numel(),)](x, sums, *numbers, num_warps=8, enable_fp_fusion=False)


def launch_division(
    x: Tensor, sums: Tensor, eps: float, norm: float, out: Tensor, block: int
) -> None:
    """Divide matrices by their norms, given partial sums of squares."""
    size, parts = x.shape[-2] * x.shape[-1], sums.shape[-1]
    widths = (triton.next_power_of_2(parts), 4 * block)
    grid = (triton.cdiv(size, 4 * block) * (x.numel() // size),)
    numbers = ((eps, norm), size, parts, widths)
    _divide[grid](x, sums, out, *numbers, num_warps=8, enable_fp_fusion=False)
