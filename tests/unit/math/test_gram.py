"""The pieces of the Gram iteration, and a matrix whose long side is cut over ranks."""

import gc
from dataclasses import dataclass
from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.math.algorithm import AlgorithmT, Plan, PrecisionT, choose_algorithm
from megatron_eopt.math.coefficients import resolve_coefficients
from megatron_eopt.math.newton_schulz import (
    Shifted,
    accumulate,
    apply,
    gram_residual,
    iterate_gram,
    iterate_standard,
    normalize,
)
from megatron_eopt.math.orthogonalize import Orthogonalization, orthogonalize
from tests.unit.math.spectra import gaussian, relative_error

QUINTIC = resolve_coefficients("quintic", 5)


def dense(a: Shifted) -> Tensor:
    return a.shift * torch.eye(a.residual.shape[-1], dtype=a.residual.dtype) + a.residual


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.9])
def test_pieces_are_exact_algebra_for_any_shift(shift: float) -> None:
    x = normalize(gaussian(8, 20).double(), 1e-7, torch.float64)
    a = gram_residual(x, shift)
    torch.testing.assert_close(dense(a), x @ x.T)
    expected = iterate_standard(x.clone(), QUINTIC)
    q = accumulate(a, QUINTIC)
    torch.testing.assert_close(apply(q, x), expected)
    torch.testing.assert_close(apply(q, x.mT.contiguous(), tall=True).mT, expected)


@pytest.mark.parametrize("restarts", [(), (1,), (2, 4), (1, 2, 3, 4)])
def test_restarts_change_rounding_only(restarts: tuple[int, ...]) -> None:
    x = normalize(gaussian(8, 20).double(), 1e-7, torch.float64)
    expected = iterate_standard(x.clone(), QUINTIC)
    assert relative_error(iterate_gram(x.clone(), QUINTIC, gram(restarts)), expected) < 1e-11


def test_a_polynomial_that_vanishes_at_the_shift_is_no_division_by_zero() -> None:
    x = normalize(gaussian(8, 20).double(), 1e-7, torch.float64)
    # a + b/8 = 0: the first factor's shift vanishes, since the mean eigenvalue of 8 rows is 1/8
    triples = ((1.0, -8.0, 0.0), (2.0, -1.5, 0.5))
    expected = iterate_standard(x.clone(), triples)
    assert relative_error(iterate_gram(x.clone(), triples, gram()), expected) < 1e-11


def gram(restarts: tuple[int, ...] = ()) -> Plan:
    return Plan("gram", restarts, torch.float64)


@pytest.mark.parametrize(("algorithm", "steps"), [("standard", 4), ("standard", 5), ("gram", 5)])
@pytest.mark.parametrize("shape", [(3, 8, 20), (20, 8)])
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_in_place_is_the_same_to_the_bit_in_the_memory_that_was_given(
    algorithm: AlgorithmT, steps: int, shape: tuple[int, ...], precision: PrecisionT
) -> None:
    compute = Orthogonalization(steps=steps, algorithm=algorithm, precision=precision)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(compute.stack_dtype)
    expected = compute(x)
    assert compute(x, in_place=True) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
def test_in_place_needs_one_more_iterate_and_the_small_matrices(algorithm: AlgorithmT) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    compute = Orthogonalization(algorithm=algorithm)
    # what earlier tests left behind is not to go meanwhile
    gc.collect()
    with LiveBytes() as seen:
        compute(x, in_place=True)
    assert seen.peak <= x.nbytes + 6 * 4 * 64 * 64


class Ranks:
    """Ranks as threads that meet to add: the arithmetic of an all-reduce and its call count."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = Barrier(size, timeout=30)
        self.calls = [0] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        # collectives take memory as it lies
        assert x.is_contiguous()
        self.parts[rank] = x
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        self.calls[rank] += 1
        return parts

    def reduce(self, rank: int, x: Tensor) -> Tensor:
        return torch.stack(self.exchange(rank, x)).sum(0)


@dataclass
class TeamMember:
    """One rank of a team."""

    ranks: Ranks
    rank: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.ranks.reduce(self.rank, x)

    def rows(self, m: int) -> tuple[int, int]:
        height = m // len(self.ranks.parts)
        return self.rank * height, (self.rank + 1) * height

    def gather(self, block: Tensor) -> Tensor:
        return torch.cat(self.ranks.exchange(self.rank, block), -2)


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # float32: sums in another order; bfloat16: the partial Gram matrices are rounded before the sum
    [(torch.float64, 1e-11), (torch.float32, 2e-6), (torch.bfloat16, 1.7e-2)],
)
@pytest.mark.parametrize("shape", [(32, 160), (160, 32), (2, 32, 160)])
@pytest.mark.parametrize("team", [False, True], ids=["sums", "team"])
def test_a_long_side_cut_over_ranks_gives_the_cut_result(
    algorithm: AlgorithmT,
    dtype: torch.dtype,
    tolerance: float,
    shape: tuple[int, ...],
    team: bool,
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    precision = "medium" if dtype == torch.bfloat16 else "highest"
    whole = orthogonalize(x, algorithm=algorithm, precision=precision)  # type: ignore[arg-type]
    dim = -2 if shape[-2] > shape[-1] else -1
    pieces = torch.split(x, [50, 10, 80, 20], dim)
    ranks = Ranks(len(pieces))
    results: list[Tensor] = [torch.empty(0)] * len(pieces)

    def run(rank: int) -> None:
        results[rank] = orthogonalize(
            pieces[rank],
            algorithm=algorithm,
            precision=precision,  # type: ignore[arg-type]
            reduce=TeamMember(ranks, rank) if team else lambda t: ranks.reduce(rank, t),
            whole_shape=(shape[-2], shape[-1]),
        )

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(pieces))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert relative_error(torch.cat(results, dim), whole) < tolerance
    plan = choose_algorithm((shape[-2], shape[-1]), dtype, precision, QUINTIC, algorithm)  # type: ignore[arg-type]
    sums = len(plan.restarts) + 1 if algorithm == "gram" else len(QUINTIC)
    gathers = 0
    if team:
        segments = np.diff([0, *plan.restarts, len(QUINTIC)])
        per_segment = {1: 1, 2: 3, 3: 6}
        gathers = sum(per_segment[k] for k in segments) if algorithm == "gram" else len(QUINTIC)
    assert ranks.calls == [1 + sums + gathers] * len(pieces)
