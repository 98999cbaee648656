"""Memory for what comes and goes within an iteration.

Note [Scratch]
    A CPU's allocator returns memory to the system and asks for it again, page by page, each cleared
    by the kernel, which took 4 to 6 % of a step with small matrices. So a thread keeps one piece of
    memory for each name, which is overwritten when the name is asked for again; it holds nothing
    that is needed later. Of large matrices the products take most of the time, and GPUs'
    allocators keep memory by themselves: there, what is needed is new, and only while it is needed.

    Views of it are kept as well: making the twenty of a product by panels took 2 % of a step.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.math.products import multiplies_by_tiles, on_a_cpu

LARGEST = 16 << 20
"""Bytes of the largest piece that is kept."""

_CACHE_LINE = 64
"""Bytes."""

_MOST_VIEWED = 512
"""Products whose views are kept; one shape has some twenty."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.pieces: dict[tuple[str, torch.dtype], Tensor] = {}
        # holds its memory, so that no other matrix can come to lie where a key says
        self.views: dict[tuple[object, ...], Any] = {}


_kept = _Kept()


def kept() -> Iterator[Tensor]:
    """Yield all that this thread keeps."""
    yield from _kept.pieces.values()


def scratch(
    name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Return contiguous memory with any content, or None where none is kept; see Note [Scratch].

    Args:
        name: What it is for. The same name gives the same memory.
        shape: Its shape.
        like: Whose device it has, and dtype by default.
        dtype: Its dtype.
    """
    dtype = dtype or like.dtype
    size = math.prod(shape)
    # a tensor of another class only says what would be computed
    if not on_a_cpu(like) or type(like) is not Tensor or size * dtype.itemsize > LARGEST:
        return None
    piece = _kept.pieces.get((name, dtype))
    if piece is None or piece.numel() < size:
        # one made in inference mode could not be written to outside of it
        with torch.inference_mode(False):
            piece = _kept.pieces[name, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        _kept.views.clear()
    return piece[:size].view(shape)


def remembered[T](make: Callable[..., T], *arguments: Tensor | int | None) -> T:
    """Return ``make(*arguments)``, which is views, or what it was before; see Note [Scratch].

    They are remembered where this thread keeps the memory of all the tensors.
    """
    key = make, *(_place(each) if isinstance(each, Tensor) else each for each in arguments)
    if (found := _kept.views.get(key)) is not None:
        there: T = found
        return there
    with torch.inference_mode(False):
        views = make(*arguments)
    memory = {piece.data_ptr() for piece in _kept.pieces.values()}
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    # a tensor of another class has no memory
    if all(type(each) is Tensor and _memory(each) in memory for each in tensors):
        if len(_kept.views) >= _MOST_VIEWED:
            _kept.views.clear()
        _kept.views[key] = views
    return views


def _place(tensor: Tensor) -> object:
    if type(tensor) is not Tensor:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def small_matrices(count: int, x: Tensor, m: int, *, dense: bool = False) -> Tensor | None:
    """Return memory for so many ``(..., m, m)`` of an iterate ``x``, or None where none is kept.

    Where a CPU takes matrices alone and mirrors panels (Note [Symmetric products]), rows lie a line
    of its cache further apart: a power of two apart, those that are mirrored share few lines. What
    ranks sum must be ``dense``, since collectives take memory as it lies.
    """
    apart = not dense and x.ndim == 2 and not multiplies_by_tiles(x.dtype)
    padding = _CACHE_LINE // x.dtype.itemsize if apart else 0
    squares = scratch("squares", (count, *x.shape[:-2], m, m + padding), x)
    return None if squares is None else squares[..., :m]


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of this dtype, which the next one may overwrite."""
    place = scratch("converted", x.shape, x, dtype)
    return x.to(dtype, copy=True) if place is None else place.copy_(x)
