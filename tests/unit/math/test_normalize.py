"""Division by the norm: rounded once, into the place and the memory order that were asked for."""

import pytest
import torch

from megatron_eopt.math import newton_schulz
from megatron_eopt.math.newton_schulz import normalize

EPS = 1e-7
SHAPES = [(6, 10), (3, 6, 10), (2, 3, 6, 10), (0, 6, 10)]


def matrices(shape, dtype, *, tall=False):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x.mT.contiguous().mT if tall else x).to(dtype)


@pytest.fixture(params=[None, 7], ids=["at once", "row by row"])
def parts(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(newton_schulz, "_WIDENED_AT_ONCE", request.param)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_norms_become_one_and_numbers_are_rounded_once(shape, dtype, tall):
    x = matrices(shape, dtype, tall=tall)
    kept = x.clone()
    exact = x.double() / torch.linalg.matrix_norm(x.double(), keepdim=True)
    got = normalize(x, EPS, dtype)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert torch.equal(x, kept)
    # half a unit in the last place, and the rounding of the factor in float32
    bound = torch.finfo(dtype).eps / 2 + (0 if dtype == torch.float64 else 2e-7)
    torch.testing.assert_close(got.double(), exact, rtol=max(bound, 1e-15) * 1.01, atol=1e-7)


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


def test_a_norm_below_eps_is_not_divided_by():
    x = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    x[1] = 2e-9
    got = normalize(x, EPS, torch.bfloat16)
    assert not got[0].any()
    torch.testing.assert_close(got[1].float(), x[1].float() / EPS, rtol=1e-2, atol=0)
