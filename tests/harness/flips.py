"""Flips single bits in what one rank computes, holds or receives."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_eopt.math.orthogonalize import Orthogonalization

BITS = {
    torch.float32: {"sign": (31, 31), "exponent": (23, 30), "high": (12, 22), "low": (0, 11)},
    torch.bfloat16: {"sign": (15, 15), "exponent": (7, 14), "high": (4, 6), "low": (0, 3)},
}
"""The first and last bit of each kind; "high" and "low" are halves of the mantissa."""

KINDS = ("sign", "exponent", "high", "low")

PLACES = ("product", "gradient", "message")


@dataclass(frozen=True)
class Flip:
    """One flipped bit."""

    place: str  # one of PLACES
    kind: str  # one of KINDS, or a number as text, which an element becomes
    rank: int
    call: int  # which of the rank's calls, among those of a step
    seed: int  # which element and bit


def flip_(tensor: torch.Tensor, kind: str, seed: int) -> None:
    """Flip a bit of one element that is not zero, in place, or set it to the number ``kind``."""
    generator = torch.Generator().manual_seed(seed)
    flat = tensor.detach().reshape(-1)
    candidates = flat.nonzero().flatten()
    at = int(candidates[int(torch.randint(len(candidates), (), generator=generator))])
    if kind not in KINDS:
        flat[at] = float(kind)
        return
    first, last = BITS[tensor.dtype][kind]
    bit = int(torch.randint(first, last + 1, (), generator=generator))
    # the sign bit of an integer is negative
    size = 8 * tensor.dtype.itemsize
    mask = 1 << bit if bit < size - 1 else -(1 << bit)
    integers = {16: torch.int16, 32: torch.int32}[size]
    tensor.view(-1).view(integers)[at] ^= mask


@contextmanager
def flipping(flip: Flip | None) -> Iterator[list[bool]]:
    """Do one flip on its rank inside a block; yields a list that is not empty once it is done."""
    done: list[bool] = []
    if flip is None or dist.get_rank() != flip.rank:
        yield done
        return
    calls = 0

    def is_due() -> bool:
        nonlocal calls
        calls += 1
        return not done and calls > flip.call

    def hit(tensor: torch.Tensor) -> None:
        flip_(tensor, flip.kind, flip.seed)
        done.append(True)

    factors, send = Orthogonalization.factors_, dist.all_to_all_single

    def computing(self: Any, stack: torch.Tensor, *args: Any) -> None:
        due = is_due()
        if due and flip.place == "gradient":
            hit(stack)
        factors(self, stack, *args)
        if due and flip.place == "product":
            hit(stack)

    def sending(recv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = send(recv, *args, **kwargs)
        if len(recv) and is_due():
            work.wait()
            hit(recv)
        return work

    name = "all_to_all_single" if flip.place == "message" else "factors_"
    owner: Any = dist if flip.place == "message" else Orthogonalization
    with patch.object(owner, name, sending if flip.place == "message" else computing):
        yield done
