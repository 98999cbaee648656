"""The pieces of the Gram iteration."""

import gc
import math

import pytest
import torch

from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.math.algorithm import IterationPlan
from megatron_eopt.math.coefficients import coefficient_names, resolve_coefficients
from megatron_eopt.math.newton_schulz import iterate_gram, iterate_standard, normalize, rescaled
from megatron_eopt.math.orthogonalize import Orthogonalization
from tests.unit.math.spectra import gaussian, relative_error

QUINTIC = resolve_coefficients("quintic", 5)


@pytest.mark.parametrize("name", coefficient_names())
def test_a_rescaled_schedule_has_exact_diagonals_and_the_same_result(name):
    triples = (*resolve_coefficients(name, 4), (-1.5, 0.5, 0.0), (0.0, 0.0, 1.0))
    steps, scale = rescaled(triples, 64.0)
    assert all(first == 0 or math.frexp(abs(first))[0] == 0.5 for first, _, _ in steps)
    assert 2**-0.5 <= scale / 64 <= 2**0.5
    x = normalize(gaussian(8, 20).double(), 1e-7, torch.float64)
    result = iterate_standard(64 * x, steps) / scale
    assert relative_error(result, iterate_standard(x, triples)) < 1e-11


@pytest.mark.parametrize("restarts", [(), (1,), (2, 4), (1, 2, 3, 4)])
def test_restarts_change_rounding_only(restarts):
    x = normalize(gaussian(8, 20).double(), 1e-7, torch.float64)
    expected = iterate_standard(x.clone(), QUINTIC)
    plan = IterationPlan("gram", restarts, torch.float64)
    assert relative_error(iterate_gram(x.clone(), QUINTIC, plan), expected) < 1e-11


@pytest.mark.parametrize(("algorithm", "steps"), [("standard", 4), ("standard", 5), ("gram", 5)])
@pytest.mark.parametrize("shape", [(3, 8, 20), (20, 8)])
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_in_place_is_the_same_to_the_bit_in_the_memory_that_was_given(
    algorithm, steps, shape, precision
):
    compute = Orthogonalization(steps=steps, algorithm=algorithm, precision=precision)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(compute.stack_dtype)
    expected = compute(x)
    stack = x if x.ndim == 3 else x.unsqueeze(0)
    compute.factors_(stack, None, shape[-2:])
    assert torch.equal(x, expected)


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
def test_in_place_needs_one_more_iterate_and_the_small_matrices(algorithm):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    compute = Orthogonalization(algorithm=algorithm)
    # what earlier tests left behind is not to go meanwhile
    gc.collect()
    with LiveBytes() as seen:
        compute.factors_(x.unsqueeze(0), None, (64, 256))
    assert seen.peak <= x.nbytes + 6 * 4 * 64 * 64
