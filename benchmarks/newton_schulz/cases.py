"""What is measured: shapes, precisions and the ratios we promise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

from benchmarks.newton_schulz.measure import Sample, contest
from megatron_eopt.math import (
    Plan,
    PrecisionT,
    choose_algorithm,
    orthogonalize,
    resolve_coefficients,
    standard_flops,
)

STEPS = 5
MEASURED: tuple[PrecisionT, ...] = ("highest", "medium")
COEFFICIENTS: str = "quintic"

SHAPES: tuple[tuple[int, ...], ...] = (
    (512, 512),
    (1024, 1024),
    (1024, 1536),
    (768, 2048),
    (256, 1024),
    (512, 2048),
    (2048, 512),
    (1024, 4096),
    (256, 4096),
    (1024, 8192),
    (64, 128, 512),
    (16, 256, 1024),
)
GPU_SHAPE = (8192, 28672)


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        name: What is compared.
        shape: Of the input.
        precision: Of the products.
        algorithm: What ``auto`` chose, with its restarts.
        target: Smallest ratio promised; 1 means as fast.
        sample: The measurement; None if it cannot be measured here.
        tflops: Standard iteration's FLOPs over our time, in TFLOP/s; GPU only.
    """

    name: str
    shape: tuple[int, ...]
    precision: PrecisionT
    algorithm: str
    target: float
    sample: Sample | None
    tflops: float | None = None


def plan_of(shape: tuple[int, ...], precision: PrecisionT) -> Plan:
    schedule = resolve_coefficients(COEFFICIENTS, STEPS)
    return choose_algorithm((shape[-2], shape[-1]), torch.float32, precision, schedule)


def _describe(plan: Plan) -> str:
    return "gram " + ",".join(map(str, plan.restarts)) if plan.algorithm == "gram" else "standard"


def target(shape: tuple[int, ...], precision: PrecisionT) -> float:
    """Return the smallest ratio promised for a shape."""
    aspect = max(shape[-2:]) / min(shape[-2:])
    if plan_of(shape, precision).algorithm == "standard" or aspect < 4:
        return 0.97
    return 1.4 if precision == "highest" else 1.2


def theirs(x: Tensor, precision: PrecisionT) -> Tensor:
    with fp32_matmul_precision(precision):
        result: Tensor = muon_utils.newton_schulz(x, STEPS, COEFFICIENTS)
    return result


def loop(x: Tensor, precision: PrecisionT) -> list[Tensor]:
    return [orthogonalize(one, precision=precision) for one in x]


def against_emerging_optimizers(
    shapes: Sequence[tuple[int, ...]], pairs: int, precisions: Sequence[PrecisionT]
) -> Iterator[Result]:
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        for precision in precisions:
            sample = contest(
                partial(orthogonalize, x, precision=precision),
                partial(theirs, x, precision),
                pairs,
            )
            plan = _describe(plan_of(shape, precision))
            yield Result("vs EO", shape, precision, plan, target(shape, precision), sample)


def batch_against_loop(pairs: int, precisions: Sequence[PrecisionT]) -> Iterator[Result]:
    shape = (64, 128, 512)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for precision in precisions:
        sample = contest(
            partial(orthogonalize, x, precision=precision), partial(loop, x, precision), pairs
        )
        yield Result("vs loop", shape, precision, _describe(plan_of(shape, precision)), 1.3, sample)


def on_gpu(pairs: int) -> Iterator[Result]:
    """Compare ``auto`` with the plain torch standard iteration in bfloat16 on one GPU."""
    plan = _describe(plan_of(GPU_SHAPE, "medium"))
    if not torch.cuda.is_available():
        yield Result("GPU vs standard", GPU_SHAPE, "medium", plan, 1.9, None)
        return
    x = torch.randn(GPU_SHAPE, device="cuda")
    sample = contest(
        partial(orthogonalize, x, precision="medium"),
        partial(orthogonalize, x, precision="medium", algorithm="standard"),
        pairs,
    )
    tflops = standard_flops(*GPU_SHAPE, STEPS) / sample.ours / 1e9
    yield Result("GPU vs standard", GPU_SHAPE, "medium", plan, 1.9, sample, tflops)
