"""The Triton kernel of :mod:`megatron_eopt.math.products`.

Each program computes one tile of the result and finishes it in float32: factors, addends, diagonal.
For symmetric results there is one program for each tile of the lower triangle. It also stores its
tile mirrored, so that the result is symmetric to the bit.
"""

import triton
import triton.language as tl
from torch import Tensor

_DEPTH = 64  # entries of the inner dimension that are loaded at once
_SIDE = 128  # rows and columns of a tile: two programs fit a multiprocessor of an H100
_NEIGHBOURS = tl.constexpr(8)  # rows of tiles that programs visit together, so that caches serve


@triton.jit
def _lower_tile(number):
    """Return row and column of a tile, counted along the rows of the lower triangle."""
    row = ((tl.sqrt(8.0 * number + 1.0) - 1.0) / 2.0).to(tl.int32)
    # the root may be off by one where float32 rounds it
    row = tl.where(row * (row + 1) // 2 > number, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= number, row + 1, row)
    return row, number - row * (row + 1) // 2


@triton.jit
def _any_tile(number, height, width):
    """Return row and column of a tile, in groups of neighbouring rows."""
    group = number // (_NEIGHBOURS * width)
    rows = tl.minimum(height - group * _NEIGHBOURS, _NEIGHBOURS)
    within = number % (_NEIGHBOURS * width)
    return group * _NEIGHBOURS + within % rows, within // rows


@triton.jit
def _multiply(
    left, right, add, out, alpha, beta, gamma, diagonal, m, n, k,
    left_batch, left_row, left_column, right_batch, right_row, right_column,
    add_batch, add_row, add_column, out_batch, out_row, out_column,
    symmetric: tl.constexpr, even: tl.constexpr, side: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Write one tile of ``alpha left right + beta add + gamma left + diagonal I``."""
    height, width = tl.cdiv(m, side), tl.cdiv(n, side)
    tiles = height * (height + 1) // 2 if symmetric else height * width
    # not a second axis of the grid, which has at most 65,535 programs
    number, batch = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    if symmetric:
        tile_row, tile_column = _lower_tile(number)
    else:
        tile_row, tile_column = _any_tile(number, height, width)
    # all indices have 64 bits, since an index times a stride may exceed 32
    rows = (tile_row * side + tl.arange(0, side)).to(tl.int64)
    columns = (tile_column * side + tl.arange(0, side)).to(tl.int64)
    inner, ahead = tl.arange(0, depth).to(tl.int64), tl.full((), depth, tl.int64)
    lefts = left + batch * left_batch + rows[:, None] * left_row
    lefts += inner[None, :] * left_column
    rights = right + batch * right_batch + columns[None, :] * right_column
    rights += inner[:, None] * right_row
    total = tl.zeros((side, side), tl.float32)
    for start in range(0, k, depth):
        if even:
            one, other = tl.load(lefts), tl.load(rights)
        else:
            # masks instead of smaller indices, with which Triton would not load 16 bytes at once
            of_left = (rows[:, None] < m) & (inner[None, :] < k - start)
            of_right = (inner[:, None] < k - start) & (columns[None, :] < n)
            one = tl.load(lefts, mask=of_left, other=0.0)
            other = tl.load(rights, mask=of_right, other=0.0)
        total = tl.dot(one, other, total)
        lefts += ahead * left_column
        rights += ahead * right_row
    total = total * alpha
    rows, columns = rows[:, None], columns[None, :]
    inside = None if even else (rows < m) & (columns < n)
    if add is not None:
        place = add + batch * add_batch + rows * add_row + columns * add_column
        total += beta * tl.load(place, mask=inside).to(tl.float32)
    if gamma is not None:
        place = left + batch * left_batch + rows * left_row + columns * left_column
        total += gamma * tl.load(place, mask=inside).to(tl.float32)
    if diagonal != 0.0:
        total = tl.where(rows == columns, total + diagonal, total)
    value = total.to(out.dtype.element_ty)
    place = out + batch * out_batch + rows * out_row + columns * out_column
    if not symmetric:
        tl.store(place, value, mask=inside)
        return
    mirror = out + batch * out_batch
    mirror += tl.trans(columns) * out_row + tl.trans(rows) * out_column
    if tile_row == tile_column:
        # a tile on the diagonal also mirrors its lower half: its own upper half may differ in
        # rounding
        within = rows < m
        tl.store(place, value, mask=within & (rows >= columns))
        tl.store(mirror, tl.trans(value), mask=tl.trans(within & (rows > columns)))
    else:
        tl.store(place, value, mask=inside)
        tl.store(mirror, tl.trans(value), mask=None if inside is None else tl.trans(inside))


def launch(
    left: Tensor,
    right: Tensor,
    add: Tensor | None,
    out: Tensor,
    numbers: tuple[float, float, float, float],
    symmetric: bool,
) -> None:
    """Write the product and its addends to ``out``; 3-D tensors of any strides.

    ``numbers`` are alpha, beta, gamma and the diagonal's addend.
    """
    batch, m, k = left.shape
    n = right.shape[-1]
    alpha, beta, gamma, diagonal = numbers
    # else tiles are masked; smaller ones without masks would be slower
    even = m % _SIDE == 0 and n % _SIDE == 0 and k % _DEPTH == 0
    tiles = (triton.cdiv(m, _SIDE), triton.cdiv(n, _SIDE))
    count = tiles[0] * (tiles[0] + 1) // 2 if symmetric else tiles[0] * tiles[1]
    strides = [
        number for t in (left, right, out if add is None else add, out) for number in t.stride()
    ]
    _multiply[(count * batch,)](
        *(left, right, add, out, alpha, beta, gamma or None, diagonal, m, n, k, *strides),
        *(symmetric, even, _SIDE, _DEPTH),
        num_warps=8,
        num_stages=3,
        enable_fp_fusion=True,  # the terms may be added with one rounding
    )
