"""Division by the norm: rounded once, into the place and the memory order that were asked for."""

import pytest
import torch

from megatron_eopt.math.newton_schulz import normalize

EPS = 1e-7
SHAPES = [(6, 10), (3, 6, 10), (2, 3, 6, 10), (0, 6, 10)]


def matrices(shape, dtype, *, tall=False):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x.mT.contiguous().mT if tall else x).to(dtype)


def divided(x):
    return x.double() / torch.linalg.matrix_norm(x.double(), keepdim=True)


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_norms_become_one_and_numbers_are_rounded_once(shape, dtype, tall):
    x = matrices(shape, dtype, tall=tall)
    kept = x.clone()
    got = normalize(x, EPS, dtype)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert torch.equal(x, kept)
    # half a unit in the last place, and the rounding of the factor in float32
    bound = torch.finfo(dtype).eps / 2 + (0 if dtype == torch.float64 else 2e-7)
    torch.testing.assert_close(got.double(), divided(x), rtol=max(bound, 1e-15) * 1.01, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes_and_given_places_get_the_same_numbers(given, wanted, shape):
    x = matrices(shape, given)
    exact = normalize(x.float(), EPS, torch.float32).to(wanted)
    assert torch.equal(normalize(x, EPS, wanted), exact)
    place = torch.empty(shape, dtype=wanted)
    assert normalize(x, EPS, wanted, out=place) is place
    assert torch.equal(place, exact)
    if given == wanted:
        assert normalize(x, EPS, wanted, out=x) is x
        assert torch.equal(x, exact)


@pytest.mark.parametrize("entry", [1.0, 1.00390625, 3e-20, 3e15])
def test_the_norm_of_a_large_weight_is_right(entry):
    # equal entries: a flat sum of their squares loses most
    x = torch.full((1, 1024, 2048), entry, dtype=torch.bfloat16)
    got = normalize(x, 1e-15, torch.bfloat16)
    want = divided(x) if entry > 1e-19 else x.double() / 1e-15
    # float32 sums of two million numbers lose at most three digits on any vectors, rounding is 2^-9
    torch.testing.assert_close(got.double(), want, rtol=2**-9 + 1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_squared_norms_are_summed_over_ranks(dtype):
    x = matrices((3, 6, 10), dtype)
    seen = []

    def twice(squares):
        seen.append(squares.clone())
        return squares.mul_(4)

    got = normalize(x, EPS, dtype, twice)
    norms = torch.linalg.matrix_norm(x.double())
    # float32 sums of ten and sixty numbers
    torch.testing.assert_close(seen[0].flatten(), norms.square(), rtol=1e-5, atol=0)
    half = normalize(x, EPS, dtype).float() / 2
    torch.testing.assert_close(got.float(), half, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("entry", [0.0, 2e-9, float("nan"), float("inf")])
def test_a_norm_that_cannot_be_divided_by_leaves_other_matrices_alone(entry, dtype):
    x = matrices((3, 6, 10), dtype)
    x[1] = entry
    got = normalize(x, EPS, dtype)
    others = [0, 2]
    torch.testing.assert_close(
        got[others].double(), divided(x[others]), rtol=torch.finfo(dtype).eps, atol=1e-7
    )
    if entry < 1.0:
        want = x[1].double() / EPS
        torch.testing.assert_close(got[1].double(), want, rtol=torch.finfo(dtype).eps, atol=0)
    else:
        assert not got[1].isfinite().any()
