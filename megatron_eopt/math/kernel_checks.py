"""The runs by which kernels are checked, see Note [Self-check] of ``megatron_eopt.base.kernels``.

Their numbers are such that products, sums and passes are exact, except for Adam's. They have the
variants that a step compiles: both 16-bit types, wide and tall, whole tiles and masked ones, and
aligned and odd addresses. Sizes are such that each index of a kernel goes beyond 1: batches, tiles,
groups of tiles, blocks of the inner dimension, chunks and parts.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_eopt.base.kernels import Case, integers, whole
from megatron_eopt.math import norms, passes, products
from megatron_eopt.math.backends import GRAM_NEWTON_SCHULZ
from megatron_eopt.math.orthogonalize import orthogonalize

_F32, _BF16, _F16 = torch.float32, torch.bfloat16, torch.float16


class _Product(NamedTuple):
    """One variant of the kernel for products: sizes ``(m, k, n)`` and terms."""

    name: str
    m: int
    k: int
    n: int
    dtype: torch.dtype
    out: torch.dtype
    is_symmetric: bool = True
    adds: bool = False
    gamma: float = 0.0
    is_tall: bool = False
    batch: int = 3


_PRODUCTS = (
    _Product("X X^T", 256, 640, 256, _F16, _F16),
    _Product("X X^T of tall X", 256, 128, 256, _F16, _F16, is_tall=True),
    _Product("b A + c A^2", 384, 384, 384, _F16, _F16, adds=True),
    _Product("half of R Q + a (R + Q)", 256, 256, 256, _F16, _F16, adds=True, gamma=4.0),
    _Product("R Q + a (R + Q)", 256, 256, 256, _F16, _F16, False, adds=True, gamma=4.0),
    _Product("Q X", 1152, 64, 384, _F16, _BF16, False, batch=1),
    _Product("b A + c A^2", 256, 256, 256, _BF16, _BF16, adds=True),
    _Product("a X + P X", 2176, 64, 256, _BF16, _BF16, False, adds=True, batch=1),
    _Product("X X^T", 272, 592, 272, _F16, _F16),
    _Product("X X^T of tall X", 256, 80, 256, _F16, _F16, is_tall=True),
    _Product("half of R Q + a (R + Q)", 144, 144, 144, _F16, _F16, adds=True, gamma=4.0),
    _Product("R Q + a (R + Q)", 144, 144, 144, _F16, _F16, False, adds=True, gamma=4.0),
    _Product("Q X", 144, 64, 256, _F16, _BF16, False),
    _Product("Q X", 128, 64, 272, _F16, _BF16, False),
    _Product("b A + c A^2", 144, 144, 144, _BF16, _BF16, adds=True),
    # 16 rows of tiles
    _Product("X X^T", 2048, 64, 2048, _F16, _F16, batch=1),
)


@products.KERNELS.checked_by
def _products(device: torch.device) -> Iterator[Case]:
    for case in _PRODUCTS:
        yield Case(_name_of(case), partial(_multiplied, case, device))


@products.QUACK.checked_by
def _by_quack(device: torch.device) -> Iterator[Case]:
    for case in _PRODUCTS:
        if case.is_symmetric and not case.gamma:
            yield Case(_name_of(case), partial(_multiplied, case, device, by_quack=True))


def _name_of(case: _Product) -> str:
    return f"{case.name} ({case.m} x {case.n}, {case.dtype} to {case.out})"


def _multiplied(
    case: _Product, device: torch.device, *, by_quack: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    alpha, beta, diagonal = 0.5, 2.0, 8.0 if case.adds and case.is_symmetric else 0.0
    batch = case.batch
    given: dict[str, Any] = {"dtype": case.dtype, "device": device}
    shape = (case.k, case.m) if case.is_tall else (case.m, case.k)
    left = integers(1, batch, *shape, **given)
    left = left.mT if case.is_tall else left
    if not case.is_symmetric:
        right = integers(2, batch, case.k, case.n, **given)
    elif case.adds:
        # symmetric matrices that commute
        left.add_(left.mT.clone())
        right = left
    else:
        right = left.mT
    add = integers(3, batch, case.m, case.n, **given) if case.adds else None
    if add is not None and case.is_symmetric:
        add.add_(add.mT.clone())
    outs = [integers(4, batch, case.m, case.n, dtype=case.out, device=device) for _ in range(2)]
    numbers = (alpha, beta, case.gamma, diagonal)
    if by_quack:
        products.multiply_by_quack(left, right, add, (alpha, beta, diagonal), outs[0])
    else:
        products.multiply_by_triton(left, right, add, numbers, case.is_symmetric, outs[0])
    total = alpha * (left.double() @ right.double())
    total += 0.0 if add is None else beta * add.double()
    total += case.gamma * left.double() if case.gamma else 0.0
    if by_quack:
        # it is added to what has been rounded
        outs[1].copy_(total).diagonal(0, -2, -1).add_(diagonal)
    else:
        total.diagonal(0, -2, -1).add_(diagonal)
        outs[1].copy_(total)
    found, wanted = map(whole, outs)
    return [found], [wanted]


type _ListsT = list[list[Tensor]]


class _Pass(NamedTuple):
    """One variant of a pass: the dtypes of its lists, None for an empty one, and its numbers."""

    name: str
    dtypes: tuple[torch.dtype | None, ...]
    numbers: tuple[float, ...]
    grad_scale: float | None = None


_ADAM = {"lr": 0.25, "betas": (0.75, 0.5), "eps": 0.25, "weight_decay": 0.25}
_L2, _DECOUPLED = ({**_ADAM, "decoupled_weight_decay": value} for value in (False, True))
_OF_ADAM = (_F32, _F32, _F32, _BF16, _F32, _F32)
_MIX = (0.25, 0.75, 0.0)  # momentum 0.75, Nesterov
_DECAYED = (0.75, 1.0, 0.5)  # momentum 0.25, decay 0.5
_UPDATE = (-0.5, -0.25, 0.0)  # rate 0.25, decay 0.5
_CAUTIOUS = (-0.5, -0.25, 1.0)
_PASSES = (
    _Pass("momentum_update", (_F32, _BF16, _F32, None, torch.float64), _MIX, 0.5),
    _Pass("momentum_update", (_F32, None, _BF16, _F32, None), _DECAYED),
    _Pass("momentum_update", (_F32, _BF16, _F32, None, None), _MIX, math.nan),
    _Pass("update", (_F32, _BF16, _BF16), _UPDATE, 1.0),
    _Pass("update", (_F32, None, _F32), _CAUTIOUS),
    _Pass("adam", _OF_ADAM, passes.adam_numbers(_DECOUPLED, cautious=True), 0.5),
    _Pass("adam", _OF_ADAM, passes.adam_numbers(_DECOUPLED)),
    _Pass("adam", (*_OF_ADAM[:3], None, _F32, _F32), passes.adam_numbers(_L2)),
)
_SIZES = {"aligned": (0, (6144, 64, 2048, 4096)), "odd": (1, (5001, 1, 33, 7001))}
"""How many elements after an aligned address tensors begin, and their sizes."""


@passes.KERNELS.checked_by
def _passes(device: torch.device) -> Iterator[Case]:
    kept: list[Any] = []  # so that each run has addresses of its own
    for kind, case in product(_SIZES, _PASSES):
        name = f"{case.name} of {kind} tensors, factor {case.grad_scale}"
        # an exponential and a root of Adam's are not exact
        most = 1e-6 if case.name == "adam" else 0.0
        run = partial(_passed, case, kind, device, kept)
        yield Case(name, run, most)
        yield Case(f"{name}, elsewhere", run, most)


def _passed(
    case: _Pass, kind: str, device: torch.device, kept: list[Any]
) -> tuple[list[Tensor], list[Tensor]]:
    grad_scale = None if case.grad_scale is None else torch.tensor(case.grad_scale).to(device)
    found, wanted = _lists(case, kind, device), _lists(case, kind, device)
    kept += [found, grad_scale]
    operator = getattr(torch.ops.megatron_eopt, case.name)
    operator(*found, grad_scale, case.numbers)
    passes.ON_HOST[case.name](wanted, grad_scale, case.numbers)
    if case.name == "momentum_update" and wanted[4]:
        for out, sums in zip(wanted[1], wanted[4], strict=True):
            blocks = torch.split(out.double().square(), passes.BLOCK)
            sums.copy_(torch.stack([block.sum() for block in blocks]))
    if case.name == "adam":
        # weights may differ in a last bit, of which a copy in 16 bits may make a whole one
        for weight, copy in zip(found[0], wanted[3], strict=False):
            copy.copy_(weight)
    return _memory(found), _memory(wanted)


def _lists(case: _Pass, kind: str, device: torch.device) -> _ListsT:
    shift, sizes = _SIZES[kind]
    lists: _ListsT = [[] for _ in case.dtypes]
    for number, dtype in enumerate(case.dtypes):
        for n, size in enumerate(sizes if dtype else ()):
            # sums in float64, one for each block
            count = -(-size // passes.BLOCK) if dtype == torch.float64 else size
            given: dict[str, Any] = {"dtype": dtype, "device": device, "shift": shift}
            lists[number].append(integers(10 * number + n, count, **given))
    if case.name == "adam":
        for second in lists[2]:
            second.square_()
        lists[5] = [torch.full((), 3.0, device=device) for _ in sizes]
    return lists


def _memory(lists: _ListsT) -> list[Tensor]:
    return [whole(tensor) for some in lists for tensor in some]


@norms.KERNELS.checked_by
def _norms(device: torch.device) -> Iterator[Case]:
    for shape in ((3, 208, 208), (3, 201, 203), (1, 16, 16)):
        for dtype, out in ((_BF16, _F16), (_F32, _BF16)):
            of = f"of {shape[0]} {dtype} matrices {shape[1]} x {shape[2]}"
            given: dict[str, Any] = {"dtype": dtype, "device": device}
            make = partial(integers, 1, *shape, **given)
            yield Case(f"the sums of squares {of}", partial(_summed, make))
            yield Case(f"the division {of}", partial(_divided, make, out), 1e-3)


def _summed(make: Callable[[], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    x = make()
    return [norms.sums_of_squares(x).sum(-1)], [x.double().square().sum((-2, -1))]


def _divided(make: Callable[[], Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    found, wanted = [], []
    # of numbers, of numbers whose norm is too small, and of nan
    for eps, value in ((1e-7, 1.0), (1e6, 1.0), (1e-7, math.nan)):
        x = make()
        x[0, 0, 0] = value
        squares = x.double().square().sum((-2, -1), keepdim=True)
        outs = [integers(2, *x.shape, dtype=dtype, device=x.device) for _ in range(2)]
        # in five parts
        parts = squares[..., 0] * squares.new_tensor([0.25, 0.125, 0.25, 0.25, 0.125])
        norms.divide(x, parts, eps, 64.0, outs[0])
        outs[1].copy_(x.double() * 64.0 / squares.sqrt().clamp(min=eps))
        found.append(whole(outs[0]))
        wanted.append(whole(outs[1]))
    return found, wanted


@GRAM_NEWTON_SCHULZ.checked_by
def _packages(device: torch.device) -> Iterator[Case]:
    def compute() -> tuple[list[Tensor], list[Tensor]]:
        # small kernels take over at 256 rows
        x = integers(1, 2, 272, 544, dtype=_F32, device=device)
        before = whole(x).clone()
        how: dict[str, Any] = {"backend": "gram_newton_schulz", "precision": "medium"}
        found, wanted = orthogonalize(x, **how), orthogonalize(x.double())
        # it must not change what it reads
        return [found.double(), whole(x)], [wanted, before]

    # of float16, whose error is a tenth of that
    yield Case("orthogonalizing 2 matrices 272 x 544", compute, 2e-2)
