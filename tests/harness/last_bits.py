"""What a processor that rounds otherwise would make of a run.

:func:`other_last_bits` moves results of inexact operations by a few last bits, so that one machine
can tell how far another's may stray. As a program it runs a script that way:

    torchrun ... -m tests.harness.last_bits SEED SCRIPT ARGUMENTS...
"""

import contextlib
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGEST_MOVE = 4
"""In last bits of float32. A sum of K terms in another order strays by about sqrt(K) halves of the
last bit, and the sums of the functional cases have 32 to 512 terms."""

MOVED_OF_16_BITS = 16
"""One in so many results of 16 bits is moved, and by one last bit: sums are carried in float32 and
rounded at their end, so that another order matters near the middle between two numbers only."""

_INEXACT = frozenset(
    """
    mm addmm bmm baddbmm addbmm mv addmv dot vdot sum mean prod trace cumsum norm vector_norm
    matrix_norm logsumexp softmax softmax_backward_data log_softmax log_softmax_backward_data
    native_layer_norm native_layer_norm_backward fused_rms_norm fused_rms_norm_backward
    embedding_dense_backward index_add index_put index_put_impl scatter_add
    eigh qr svd cholesky_ex solve_triangular lu_factor_ex inv_ex
    lerp addcmul addcdiv fused_adam fused_adamw
    exp log log2 log1p expm1 pow rsqrt tanh sigmoid erf sin cos gelu gelu_backward silu
    silu_backward normal randn randn_like
    """.split()
)
"""Operations of torch whose last bits IEEE arithmetic leaves open, by the core of their names."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def move(values: Tensor, seed: int) -> None:
    """Move numbers up and down by last bits, in place.

    How far is a function of a number's bits, its place and the seed, so that ranks that compute the
    same go on having the same. Whole numbers stay: they are counts, exact on every machine.
    """
    bits = values.view(_INTEGERS[values.element_size()])
    places = torch.arange(values.numel(), device=values.device).view(values.shape)
    chance = _scattered(_scattered(bits.to(torch.int64) + (seed << 32)) + places)
    if values.element_size() == 2:
        steps = torch.where(chance % MOVED_OF_16_BITS == 0, (chance >> 8) % 2 * 2 - 1, 0)
    else:
        steps = chance % (2 * LARGEST_MOVE + 1) - LARGEST_MOVE
    # of the smallest numbers a few last bits are all bits
    normal = torch.isfinite(values) & (values.abs() >= torch.finfo(values.dtype).tiny)
    movable = normal & (values != values.round())
    bits += torch.where(movable, steps, 0).to(bits.dtype)


def _scattered(numbers: Tensor) -> Tensor:
    """Return numbers from 0 to 2^30 in each of which every bit of an int64 has a part."""
    for _ in range(2):
        numbers = numbers * -0x61C8864680B583EB  # 2^64 divided by the golden ratio
        numbers = numbers ^ ((numbers >> 31) & 0x1FFFFFFFF)
    return numbers & 0x3FFFFFFF


class _OtherLastBits(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _core(func) in _INEXACT:
            # what works on lists in place returns nothing
            for value in tree_leaves(args[0] if result is None else result):
                if isinstance(value, Tensor) and value.is_floating_point():
                    move(value.detach(), self._seed)
        return result


def _core(func: Any) -> str:
    """Return an operation's name without what says how it is called: ``_foreach_lerp_``: lerp."""
    name: str = func._schema.name.partition("::")[2]
    for prefix in ("_foreach_", "_linalg_", "linalg_", "_"):
        name = name.removeprefix(prefix)
    return name.removesuffix("_")


@contextlib.contextmanager
def other_last_bits(seed: int | None) -> Iterator[None]:
    """Let operations whose last bits are open round otherwise, unless the seed is None."""
    with contextlib.nullcontext() if seed is None else _OtherLastBits(seed):
        yield


def main() -> None:
    """Run the script of the command line."""
    seed = int(sys.argv[1])
    del sys.argv[:2]
    with other_last_bits(seed):
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
