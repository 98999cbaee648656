"""Triton kernels of :mod:`megatron_eopt.math.passes`: one launch for all tensors of some lists.

A kernel gets two tables. ``programs`` has for each program the index of its tensor, then of its
block in the tensor; it follows from sizes. ``table`` has the size of each tensor, then the
addresses of the tensors, list by list. Products and sums are fused only where the code says so, as
in torch's kernels.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from megatron_eopt.base.kernel_tables import TYPES, programs_of, table_of
from megatron_eopt.math import passes

BLOCK = tl.constexpr(passes.BLOCK)
"""Elements per program."""


@triton.jit
def _place(programs, table, grad_scale, aligned: tl.constexpr):
    """Return the index of this program's tensor, and the offsets and mask of its elements."""
    number = tl.load(programs + tl.program_id(0))
    block = tl.load(programs + tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    size = tl.load(table + number)
    if grad_scale is not None:
        factor = tl.load(grad_scale)
        # nan differs from itself; with a size of 0 the mask is empty, and nothing is written
        size = tl.where(factor == factor, size, 0)
    if aligned:
        size = tl.multiple_of(size, 16)
    places = block * BLOCK + tl.arange(0, BLOCK)
    return number, places, places < size


@triton.jit
def _at(table, row, number, dtype: tl.constexpr, aligned: tl.constexpr):
    """Return the pointer to a tensor, given the table row with the addresses of its list."""
    begin = tl.load(table + row + number).to(tl.pointer_type(dtype))
    if aligned:
        begin = tl.multiple_of(begin, 16)
    return begin


@triton.jit
def _scaled(grads, mask, grad_scale, dtype: tl.constexpr):
    """Return gradients in float32, multiplied and rounded as an in-place product would be."""
    grad = tl.load(grads, mask=mask).to(tl.float32)
    if grad_scale is not None:
        grad = (grad * tl.load(grad_scale)).to(dtype).to(tl.float32)
    return grad


@triton.jit
def _lerp(start, end, weight):
    """Interpolate like ``torch.lerp``, from the nearer end."""
    is_small = tl.abs(weight) < 0.5
    return tl.fma(
        tl.where(is_small, weight, weight - 1), end - start, tl.where(is_small, start, end)
    )


@triton.jit
def _decayed(weight, update, decay, cautious):
    """Decay weights; see Note [Cautious weight decay] of passes.py."""
    opposed = ((update > 0) & (weight < 0)) | ((update < 0) & (weight > 0))
    # ``cautious`` is 1 or 0
    return tl.fma(weight, tl.where(opposed, decay - cautious * decay, decay), weight)


@triton.jit
def momentum_update(
    programs, table, count, grad_scale, numbers, dtypes: tl.constexpr, aligned: tl.constexpr
):
    """Update momenta and write directions, and the sum of squares of each block of these.

    Lists: momenta, directions, gradients, weights, sums.
    """
    number, places, mask = _place(programs, table, grad_scale, aligned)
    kept = _at(table, count, number, dtypes[0], aligned) + places
    grads = _at(table, 3 * count, number, dtypes[2], aligned) + places
    grad = _scaled(grads, mask, grad_scale, dtypes[2])
    if dtypes[3] is not None:
        weight = tl.load(_at(table, 4 * count, number, dtypes[3], aligned) + places, mask=mask)
        grad = tl.fma(weight.to(tl.float32), numbers[2], grad)
        # as torch: a sum of two bfloat16 tensors is rounded, one of bfloat16 and float32 is float32
        if dtypes[3] == dtypes[2]:
            grad = grad.to(dtypes[2])
    grad = grad.to(dtypes[0]).to(tl.float32)
    start, share = tl.load(kept, mask=mask).to(tl.float32), numbers[0]
    mixed = _lerp(start, grad, share).to(dtypes[0])
    tl.store(kept, mixed, mask=mask)
    if dtypes[1] is not None:
        found = _lerp(grad, mixed.to(tl.float32), numbers[1])
        found = found.to(dtypes[0]).to(dtypes[1])
        tl.store(_at(table, 2 * count, number, dtypes[1], aligned) + places, found, mask=mask)
        if dtypes[4] is not None:
            # of the direction as it was rounded, since that is what will be divided by its norm
            value = tl.where(mask, found.to(tl.float64), 0.0)
            sums = _at(table, 5 * count, number, dtypes[4], False)
            block = tl.load(programs + tl.num_programs(0) + tl.program_id(0))
            tl.store(sums + block, tl.sum(value * value))


@triton.jit
def update(
    programs, table, count, grad_scale, numbers, dtypes: tl.constexpr, aligned: tl.constexpr
):
    """Decay weights and add updates; lists: weights, 16-bit weights, updates."""
    number, places, mask = _place(programs, table, grad_scale, aligned)
    weights = _at(table, count, number, dtypes[0], aligned) + places
    step = tl.load(_at(table, 3 * count, number, dtypes[2], aligned) + places, mask=mask)
    if dtypes[2].primitive_bitwidth >= dtypes[0].primitive_bitwidth:
        # a wider update is rounded first, as torch's passes do; a narrower one is exact in float32
        step = step.to(dtypes[0])
    step = step.to(tl.float32)
    weight = tl.load(weights, mask=mask).to(tl.float32)
    weight = _decayed(weight, step, numbers[0], numbers[2])
    weight = weight.to(dtypes[0]).to(tl.float32)
    weight = tl.fma(step, numbers[1], weight).to(dtypes[0])
    tl.store(weights, weight, mask=mask)
    if dtypes[1] is not None:
        rounded = weight.to(dtypes[1])
        tl.store(_at(table, 2 * count, number, dtypes[1], aligned) + places, rounded, mask=mask)


@triton.jit
def adam(programs, table, count, grad_scale, numbers, dtypes: tl.constexpr, aligned: tl.constexpr):
    """Run an Adam step; lists: weights, both moments, 16-bit weights, gradients, step counts."""
    number, places, mask = _place(programs, table, grad_scale, aligned)
    steps = tl.load(_at(table, 6 * count, number, dtypes[5], False)).to(tl.float64)
    weights = _at(table, count, number, dtypes[0], aligned) + places
    firsts = _at(table, 2 * count, number, dtypes[1], aligned) + places
    seconds = _at(table, 3 * count, number, dtypes[2], aligned) + places
    grads = _at(table, 5 * count, number, dtypes[4], aligned) + places
    grad = _scaled(grads, mask, grad_scale, dtypes[4])
    weight = tl.load(weights, mask=mask).to(tl.float32)
    grad = tl.fma(weight, numbers[2], grad)
    first = tl.load(firsts, mask=mask).to(tl.float32)
    second = tl.load(seconds, mask=mask).to(tl.float32)
    # numbers 3 and 4 are 1 - beta; from a float32 0.999 it would have a relative error of 1.3e-5
    first = tl.fma(grad - first, numbers[3], first)
    second = tl.fma(grad * grad - second, numbers[4], second)
    weight = _decayed(weight, first, numbers[1], numbers[8])
    # in float32, 1 - beta^steps could lose all its digits
    lr, log1, log2 = numbers[0], numbers[5], numbers[6]
    rate = (lr / (1 - tl.exp2(steps * log1))).to(tl.float32)
    root = tl.sqrt(1 - tl.exp2(steps * log2)).to(tl.float32)
    divisor = tl.div_rn(tl.sqrt_rn(second), root) + numbers[7]
    weight = (weight - tl.div_rn(rate * first, divisor)).to(dtypes[0])
    tl.store(weights, weight, mask=mask)
    tl.store(firsts, first.to(dtypes[1]), mask=mask)
    tl.store(seconds, second.to(dtypes[2]), mask=mask)
    if dtypes[3] is not None:
        rounded = weight.to(dtypes[3])
        tl.store(_at(table, 4 * count, number, dtypes[3], aligned) + places, rounded, mask=mask)


def launch(
    name: str,
    lists: Sequence[Sequence[Tensor]],
    grad_scale: Tensor | None,
    numbers: Sequence[float],
) -> None:
    """Launch the kernel of this name over lists of tensors; all but the first list may be empty.

    Tensors at the same index have one size, and those of a list one dtype; sums are as many as the
    blocks. Tensors that are not aligned get a launch of their own, since they need narrow loads.
    """
    dtypes = tuple(TYPES[some[0].dtype] if some else None for some in lists)
    # a kernel does not read the addresses of an empty list
    columns = [[tensor.data_ptr() for tensor in some] or [0] * len(lists[0]) for some in lists]
    parts: dict[bool, list[tuple[int, ...]]] = {}
    for tensor, *addresses in zip(lists[0], *columns, strict=True):
        row = (tensor.numel(), *addresses)
        parts.setdefault(not any(number % 16 for number in row), []).append(row)
    device = lists[0][0].device
    for aligned, rows in parts.items():
        counts = tuple(-(-row[0] // BLOCK.value) for row in rows)
        if not any(counts):
            continue
        sizes_and_addresses = tuple(chain(*zip(*rows, strict=True)))
        globals()[name][(sum(counts),)](
            programs_of(device, counts).on_this_stream(),
            table_of(device, sizes_and_addresses).on_this_stream(),
            len(rows),
            grad_scale,
            tuple(np.array(numbers, np.float32).tolist()),  # kernels take float32
            dtypes,
            aligned,
            num_warps=8,
            enable_fp_fusion=False,
        )
