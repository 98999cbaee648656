import gc
import math

import pytest
import torch

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.math import orthogonalize
from megatron_eopt.math.algorithm import IterationPlan
from megatron_eopt.math.coefficients import coefficient_names, resolve_coefficients, table
from megatron_eopt.math.newton_schulz import iterate_gram, iterate_standard, normalize, rescaled
from megatron_eopt.math.orthogonalize import SMALLEST_EPS, Orthogonalization, scale_factor
from tests.unit.math.spectra import NAMED, gaussian, oracle, relative_error


@pytest.mark.parametrize("name", coefficient_names())
@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (24, 24), (7, 5), (3, 40), (9, 1)])
def test_float64_equals_the_svd_oracle(name, algorithm, shape):
    triples = resolve_coefficients(name, len(table(name)))
    for draw in NAMED.values():
        x = draw(*shape).double()
        result = orthogonalize(x, coefficients=triples, steps=len(triples), algorithm=algorithm)
        # float64 rounding, amplified by at most the growth of the smallest singular values squared
        assert relative_error(result, oracle(x, triples)) < 1e-9


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(6, 16, 40), (2, 3, 40, 16), (150, 64, 128)])
def test_a_batch_equals_a_loop(shape, algorithm):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalize(x, algorithm=algorithm)
    loop = [orthogonalize(one, algorithm=algorithm) for one in x.flatten(0, -3)]
    # batched and single products add in another order
    assert relative_error(result, torch.stack(loop).reshape(shape)) < 5e-6


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_shape_dtype_and_input_are_kept(algorithm, precision, dtype):
    x = gaussian(24, 8).to(dtype)
    before = x.clone()
    result = orthogonalize(x, algorithm=algorithm, precision=precision)
    assert result.shape == x.shape
    assert result.dtype == dtype
    assert torch.equal(x, before)
    assert result.data_ptr() != x.data_ptr()


EDGES = {
    "zero": torch.zeros(8, 24),
    "tiny": 1e-30 * gaussian(8, 24),
    "denormal": torch.full((8, 24), 1e-42),
    "rank one": torch.ones(8, 24),
    "rank deficient": gaussian(8, 2) @ gaussian(2, 24),
    "huge": 1e18 * gaussian(8, 24),
    "row": gaussian(1, 24),
    "column": gaussian(24, 1),
    "one number": gaussian(1, 1),
}


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("edge", EDGES)
def test_edge_cases_stay_finite(edge, precision, algorithm):
    for eps in (1e-7, SMALLEST_EPS):
        result = orthogonalize(EDGES[edge], algorithm=algorithm, precision=precision, eps=eps)
        assert result.isfinite().all()
        # quintic's largest value is 1.14; 16-bit rounding adds a little
        assert torch.linalg.matrix_norm(result, 2) < 1.25


@pytest.mark.parametrize(("coefficients", "steps"), [("deepseekv4", 10), ("polar_express", 8)])
def test_the_gram_form_of_small_matrices_stays_accurate_in_16_bits(coefficients, steps):
    for m, n in [(4, 4), (4, 64), (16, 64), (128, 512)]:
        # singular values from 1 to 1e-3
        u, _, vh = torch.linalg.svd(gaussian(m, n), full_matrices=False)
        x = u * torch.logspace(0, -3, m) @ vh
        own = {"coefficients": coefficients, "steps": steps}
        exact = orthogonalize(x.double(), **own)
        result = orthogonalize(x, algorithm="gram", precision="medium", **own)
        # where the operands of products were bfloat16 it was nan for 4 rows, and 0.1 for 16
        assert relative_error(result, exact) < 1e-3


def test_the_scale_of_the_input_does_not_matter():
    x = gaussian(8, 24)
    reference = orthogonalize(x)
    for scale in (1e-5, 1e-12, 1e12):
        # below eps the update shrinks by design; with a smaller eps it does not
        assert relative_error(orthogonalize(scale * x, eps=1e-25), reference) < 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1e-9, 1e-3, 1.0, 1e3, 1e7])
def test_no_factor_leaves_the_range_of_16_bits(factor, dtype):
    x = gaussian(256, 1024).to(dtype)
    result = orthogonalize(x, scale=factor, precision="medium")
    # float16's error, and the last rounding to the dtype
    bound = 2e-3 + torch.finfo(dtype).eps
    assert relative_error(result / factor, orthogonalize(x.double())) < bound


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_strides_do_not_matter(shape):
    x = gaussian(*shape)
    for strided in (
        x.T.contiguous().T,
        torch.stack([x, x], dim=-1)[..., 0],
        x.expand(3, *x.shape)[1],
    ):
        # another summation order inside the products
        assert relative_error(orthogonalize(strided), orthogonalize(x)) < 5e-6


def test_matrices_travel_as_the_products_take_them():
    def dtype(backend, precision):
        return Orthogonalization(backend=backend, precision=precision).stack_dtype

    assert dtype("torch", "highest") == dtype("torch", "high") == torch.float32
    assert dtype("torch", "medium") == torch.bfloat16
    # it rounds by itself
    assert dtype("emerging_optimizers", "medium") == torch.float32


@pytest.mark.parametrize(
    ("mode", "wide", "tall"),
    [
        ("spectral", math.sqrt(32), math.sqrt(32)),
        ("unit_rms_norm", math.sqrt(8 / 32), math.sqrt(32 / 8)),
        ("shape_scaling", 1.0, math.sqrt(32 / 8)),
        ("adamw_rms", 0.2 * math.sqrt(32), 0.2 * math.sqrt(32)),
    ],
)
def test_factors_of_shapes(mode, wide, tall):
    assert scale_factor(8, 32, mode) == pytest.approx(wide)
    assert scale_factor(32, 8, mode) == pytest.approx(tall)
    assert scale_factor(32, 8, mode, 0.5) == pytest.approx(tall / 2)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_vector_is_refused(shape):
    with pytest.raises(ConfigurationError, match=r"x=\(3?,?\): must have the shape \(m, n\)"):
        orthogonalize(torch.ones(shape))


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


def test_in_place_needs_one_more_iterate_and_the_small_matrices():
    # what earlier tests left behind is not to go meanwhile
    gc.collect()
    for algorithm in ("standard", "gram"):
        x, compute = gaussian(64, 256), Orthogonalization(algorithm=algorithm)
        with LiveBytes() as seen:
            compute.factors_(x.unsqueeze(0), None, (64, 256))
        assert seen.peak <= x.nbytes + 6 * 4 * 64 * 64, algorithm
