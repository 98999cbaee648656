"""The runs by which the kernel that copies blocks is checked, see Note [Self-check]."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.base.kernels import Case, integers, whole
from megatron_eopt.layouts.redistribution import KERNELS, copy_blocks

_BLOCKS: dict[str, tuple[int, list[Any]]] = {
    "aligned": (
        0,
        [
            ((4, 48, 96), (4, 50, 80), slice(16, 80)),
            ((6144,), (6144,), slice(None)),
            # of a width that 16 does not divide
            ((4, 48, 96), (4, 50, 80), slice(16, 56)),
        ],
    ),
    "odd": (1, [((4, 48, 40), (4, 50, 47), slice(2, 37)), ((5001,), (5001,), slice(1, None))]),
}
"""How many elements after an aligned address; sizes of sources and sinks, and columns of blocks."""


@KERNELS.checked_by
def _copies(device: torch.device) -> Iterator[Case]:
    alive: list[Tensor] = []  # so that each copy has addresses of its own
    f32, bf16 = torch.float32, torch.bfloat16
    for kind, dtypes in product(_BLOCKS, ((f32, bf16), (bf16, f32))):
        run = partial(_by_both, partial(_copied, kind, dtypes, device, alive))
        name = f"copying {kind} blocks from {dtypes[0]} to {dtypes[1]}"
        yield Case(name, run)
        yield Case(f"{name}, elsewhere", run)


def _by_both(run: Callable[..., list[Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return run(copy_blocks), run(torch._foreach_copy_)


def _copied(
    kind: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    alive: list[Tensor],
    copy: Callable[[list[Tensor], list[Tensor]], None],
) -> list[Tensor]:
    """Return all memory around the blocks after they were written."""
    shift, blocks = _BLOCKS[kind]
    sources, sinks = (
        [
            integers(9 * side + n, *block[side], dtype=dtype, device=device, shift=shift)
            for n, block in enumerate(blocks)
        ]
        for side, dtype in enumerate(dtypes)
    )
    alive += [*sources, *sinks]
    places = [(slice(3), slice(45), columns)[-len(size) :] for size, _, columns in blocks]
    outs, parts = (
        [tensor[at] for tensor, at in zip(side, places, strict=True)] for side in (sinks, sources)
    )
    copy(outs, parts)
    return [whole(sink) for sink in sinks]
