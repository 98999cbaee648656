"""Division by the norm: rounded once, into the place and the memory order that were asked for."""

from contextlib import nullcontext

import pytest
import torch

from megatron_eopt.math.newton_schulz import normalize
from tests.harness.kernels import interpreted_kernels

EPS = 1e-7
SHAPES = [(6, 10), (3, 6, 10), (2, 3, 6, 10), (5, 130, 260), (0, 6, 10)]


@pytest.fixture(params=[nullcontext, interpreted_kernels], ids=["torch", "kernels"], autouse=True)
def _way(request):
    """As a CPU does it, and as a GPU's two kernels do, by Triton's interpreter."""
    with request.param():
        yield


def matrices(shape, dtype, *, tall=False):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x.mT.contiguous().mT if tall else x).to(dtype)


def divided(x, eps=0.0):
    return x.double() / torch.linalg.matrix_norm(x.double(), keepdim=True).clamp(min=eps)


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_norms_become_64_and_numbers_are_rounded_once(shape, dtype, tall):
    x = matrices(shape, dtype, tall=tall)
    kept = x.clone()
    got = normalize(x, EPS, dtype, norm=64.0)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert torch.equal(x, kept)
    # half a unit in the last place, and the rounding of the factor in float32
    bound = torch.finfo(dtype).eps / 2 + (0 if dtype == torch.float64 else 2e-7)
    expected = 64 * divided(x)
    torch.testing.assert_close(got.double(), expected, rtol=max(bound, 1e-15) * 1.01, atol=64e-7)


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes_and_given_places_get_the_same_numbers(given, wanted):
    x = matrices((3, 6, 10), given)
    exact = normalize(x.float(), EPS, torch.float32).to(wanted)
    assert torch.equal(normalize(x, EPS, wanted), exact)
    place = x if given == wanted else torch.empty(x.shape, dtype=wanted)
    assert normalize(x, EPS, wanted, out=place) is place
    assert torch.equal(place, exact)


@pytest.mark.parametrize("entry", [1.00390625, 3e-20, 3e15])
def test_the_norm_of_a_large_weight_is_right(entry):
    # equal entries: a flat sum of their squares loses most
    x = torch.full((1, 1024, 2048), entry, dtype=torch.bfloat16)
    got = normalize(x, 1e-15, torch.bfloat16)
    want = divided(x) if entry > 1e-19 else x.double() / 1e-15
    # float32 sums of two million numbers lose at most three digits on any vectors, rounding is 2^-9
    torch.testing.assert_close(got.double(), want, rtol=2**-9 + 1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("entry", [0.0, 2e-9, float("nan"), float("inf")])
def test_a_norm_that_cannot_be_divided_by_leaves_other_matrices_alone(entry, dtype):
    x = matrices((3, 6, 10), dtype)
    x[1] = entry
    got = normalize(x, EPS, dtype)
    others, rtol = [0, 2], torch.finfo(dtype).eps
    torch.testing.assert_close(got[others].double(), divided(x[others]), rtol=rtol, atol=1e-7)
    if entry < 1.0:
        want = x[1].double() / EPS
        torch.testing.assert_close(got[1].double(), want, rtol=rtol, atol=0)
    else:
        assert not got[1].isfinite().any()


@pytest.mark.parametrize(
    ("scale", "eps"), [(1.0, 1e-7), (1e-9, 1e-7), (1e-25, 1e-30), (1e25, 1e-30), (0.0, 1e-7)]
)
def test_squares_may_leave_float32_and_ranks_may_hold_half_of_the_columns(scale, eps):
    # more than one of a kernel's chunks
    x = scale * matrices((2, 300, 400), torch.float32)
    # float32 rounds sums of as many squares as a chunk has, and the factor
    whole = normalize(x, eps, torch.float32)
    torch.testing.assert_close(whole.double(), divided(x, eps), rtol=1e-6, atol=0)
    halves, sums = [half.contiguous() for half in x.split(200, -1)], []
    for half in halves:
        normalize(half, eps, torch.float32, lambda squares: sums.append(squares.clone()) or squares)
    parts = [normalize(half, eps, torch.float32, lambda _: sum(sums)) for half in halves]
    torch.testing.assert_close(torch.cat(parts, -1), whole, rtol=1e-6, atol=0)
