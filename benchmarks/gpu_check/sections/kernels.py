"""Compare our kernels with torch's functions on the same numbers, and time them.

Cases cover one tensor and many, aligned and odd sizes, a gradient scale that skips the step, and a
stream of one's own. On a GPU, one tensor has more than 1 GB.
"""

import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.sections.newton_schulz import milliseconds_of
from megatron_eopt.base.kernels import FAMILIES, SWITCH, Family, is_on
from megatron_eopt.layouts.exchange import Copy
from megatron_eopt.layouts.redistribution import run_copies
from megatron_eopt.math.newton_schulz import normalize
from megatron_eopt.math.passes import adam_, momentum_update_, update_
from megatron_eopt.math.products import multiply, serves

SIZES = {"one": (300_000_000,), "many": (8_388_608,) * 16, "odd": (1, 33, 5_000, 16_777_217)}
SMALL_SIZES = {"one": (4_096,), "many": (4_096,) * 3, "odd": (1, 33, 5_000)}
MATRICES = {"one": (1, 8192, 8192), "many": (8, 2048, 8192), "odd": (2, 1008, 1520)}
SMALL_MATRICES = {"one": (1, 128, 128), "many": (2, 128, 64), "odd": (2, 48, 80)}
"""Sizes of products; kernels leave those that 16 does not divide to torch."""

GRAD_SCALES = (1.0, 0.3, math.nan)
ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
ADAM |= {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}

TOLERANCES = {"adam": 1e-5, "normalize": 1e-3, "product": 2e-3}
"""Largest relative deviation of kernels that promise no equal bits: of float32, then of float16."""

type Lists = list[list[Tensor]]
type Work = Callable[[Lists, Tensor | None], None]


class Case(NamedTuple):
    """One kernel on tensors of some sizes."""

    name: str
    given: Callable[[], Lists]
    work: Work
    bytes: int = 0  # read and written
    flops: int = 0
    scales: bool = True  # whether it takes a gradient scale


def run(context: Context) -> Outcome:
    """Compare and time all kernels."""
    outcome = context.outcome
    rows: list[dict[str, Any]] = []
    outcome.figures = {"rows": rows}
    if context.device == "cuda" and (faults := failed(torch.device("cuda", 0))):
        # torch's functions would be compared with themselves, here and in all other sections
        outcome.problems += faults
        return outcome
    for case in cases(context):
        with outcome.noting(case.name):
            rows.append(_row(case, context.device, outcome.problems))
            print(rows[-1], flush=True)
    rates = {row["name"]: row.get("gbps") or row.get("tflops") for row in rows}
    shown = (f"{name} {rate:.4g}" for name, rate in rates.items() if rate and "many" in name)
    outcome.headline = f"GB/s or TFLOP/s: {', '.join(shown)}"
    return outcome


def failed(device: torch.device) -> list[str]:
    """Return which kernels are not used, and why; that a package is absent is no reason."""
    if not is_on():
        return [f"{SWITCH}=0 turns all kernels off"]
    faults = {name: family.fault(device) for name, family in FAMILIES.items()}
    return [f"{name}: {fault}" for name, fault in faults.items() if fault]


def cases(context: Context) -> Iterator[Case]:
    """Yield every kernel on every list of sizes."""
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    of, device = _Numbers(context.device), context.device

    for kind, sizes in (SMALL_SIZES if context.small else SIZES).items():
        count = sum(sizes)

        def lists(*dtypes: torch.dtype, sizes: Sequence[int] = sizes) -> Callable[[], Lists]:
            return lambda: [[of((size,), dtype) for size in sizes] for dtype in dtypes]

        def with_steps(sizes: Sequence[int] = sizes) -> Lists:
            found = lists(f32, f32, f32, bf16, f32, sizes=sizes)()
            found[2] = [second.square_() for second in found[2]]
            return [*found, [torch.zeros((), device=device) for _ in found[0]]]

        yield Case(f"directions, {kind}", lists(f32, bf16, f32), _momentum_update, 14 * count)
        yield Case(f"update, {kind}", lists(f32, bf16, bf16), _update, 12 * count)
        yield Case(f"adam, {kind}", with_steps, _adam, 30 * count)
        yield Case(f"copies, {kind}", lists(bf16, bf16), _copy, 4 * count, scales=False)
    for kind, shape in (SMALL_MATRICES if context.small else MATRICES).items():
        batch, m, n = shape
        wide = batch * m * n

        def stack(shape: Sequence[int] = shape) -> Lists:
            return [[of(shape, bf16)], [torch.zeros(tuple(shape), dtype=f16, device=device)]]

        yield Case(f"normalize, {kind}", stack, _normalize, 6 * wide, scales=False)
        for form in FORMS:
            given = partial(_operands, of, form, shape)
            k = n if form.is_gram else m
            flops = batch * m * k * (m + 1 if form.is_symmetric else 2 * m)
            work = partial(_product, form)
            yield Case(f"product {form.name}, {kind}", given, work, 0, flops, scales=False)


class Form(NamedTuple):
    """A product that an iteration computes, with its terms."""

    name: str
    is_gram: bool = False  # X X^T, else of square matrices
    is_tall: bool = False  # stored with its columns dense
    beta: float = 0.0  # of an addend
    gamma: float = 0.0  # of the left matrix
    is_symmetric: bool = True  # otherwise all of it is computed


FORMS = (
    Form("X X^T", is_gram=True),
    Form("X X^T, tall", is_gram=True, is_tall=True),
    Form("with addend", beta=2.0),
    Form("with addend and gamma", beta=2.0, gamma=0.5),
    Form("whole", beta=2.0, gamma=0.5, is_symmetric=False),
)


def _operands(of: "_Numbers", form: Form, shape: Sequence[int]) -> Lists:
    """Return left, right, addend and result; square ones are symmetric where the result is."""
    batch, m, n = shape
    square = (batch, m, m)
    left = of((batch, n, m) if form.is_tall else shape if form.is_gram else square, torch.float16)
    left = left.mT if form.is_tall else left
    add = of(square, torch.float16)
    if form.is_symmetric:
        add = add + add.mT
        left = left if form.is_gram else left + left.mT
    right = left.mT if form.is_gram else left if form.is_symmetric else add
    return [[left], [right], [add], [torch.zeros_like(add)]]


class _Numbers:
    """Makes normal numbers from a seed that counts up."""

    def __init__(self, device: str) -> None:
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        found = torch.empty(tuple(shape), dtype=dtype, device=self._generator.device)
        return found.normal_(generator=self._generator)


def _momentum_update(lists: Lists, grad_scale: Tensor | None) -> None:
    momenta, outs, grads = lists
    momentum_update_(momenta, outs, grads, momenta, grad_scale, 0.95, nesterov=True)


def _update(lists: Lists, grad_scale: Tensor | None) -> None:
    weights, copies, updates = lists
    update_(weights, copies, updates, grad_scale, 0.02, 0.1)


def _adam(lists: Lists, grad_scale: Tensor | None) -> None:
    adam_(lists, [], grad_scale, ADAM)


def _copy(lists: Lists, _: Tensor | None) -> None:
    sinks, sources = lists
    whole = [Copy(i, i, (s.numel(),), (1, 0), (1, 0)) for i, s in enumerate(sources)]
    run_copies(whole, dict(enumerate(sources)), dict(enumerate(sinks)))


def _normalize(lists: Lists, _: Tensor | None) -> None:
    (x,), (out,) = lists
    normalize(x, 1e-7, out.dtype, norm=64.0, out=out)


def _product(form: Form, lists: Lists, _: Tensor | None) -> None:
    left, right, add, out = (tensor for some in lists for tensor in some)
    alpha, diagonal = 1 / left.shape[-1], 1.0 if form.is_symmetric else 0.0
    if serves(left):
        addend, terms = add if form.beta else None, {"beta": form.beta, "gamma": form.gamma}
        terms |= {"alpha": alpha, "diagonal": diagonal}
        multiply(left, right, out, addend, symmetric=form.is_symmetric, **terms)
        return
    found = alpha * (left.float() @ right.float()) + form.beta * add.float()
    if form.gamma:
        found += form.gamma * left.float()
    found.diagonal(0, -2, -1).add_(diagonal)
    out.copy_(found)


def _row(case: Case, device: str, problems: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": case.name}
    for value in GRAD_SCALES if case.scales else (None,):
        grad_scale = None if value is None else torch.tensor(value, device=device)
        start = case.given()
        found = [[tensor.clone() for tensor in some] for some in start]
        with _own_stream(device):
            case.work(found, grad_scale)
        with patch.object(Family, "runs", return_value=False):
            case.work(start, grad_scale)
        worst = max(
            _deviation(a, b)
            for some, others in zip(found, start, strict=True)
            for a, b in zip(some, others, strict=True)
        )
        row[f"deviation, {value}"] = worst
        # in this form, nan is a problem too
        if not worst <= TOLERANCES.get(re.split("[ ,]", case.name)[0], 0.0):
            problems.append(f"{case.name}, gradient scale {value}: deviates by {worst:.1e}")
        del start, found
    given, one = case.given(), torch.tensor(1.0, device=device)
    median = statistics.median(milliseconds_of(lambda: case.work(given, one), 0.3))
    row["milliseconds"] = median
    if case.flops:
        row["tflops"] = case.flops / median / 1e9
    else:
        row["gbps"] = case.bytes / median / 1e6
    return row


def _own_stream(device: str) -> Any:
    if device == "cpu":
        return nullcontext()
    return _Aside()


class _Aside:
    """Runs a block on another stream, between the work before and after it."""

    def __enter__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        self._within = torch.cuda.stream(self._stream)
        self._within.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._within.__exit__(*error)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().wait_stream(self._stream)


def _deviation(found: Tensor, expected: Tensor) -> float:
    """Return the relative deviation, 0 for equal bits."""
    if torch.equal(found, expected):
        return 0.0
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm().clamp(min=1e-30))
