"""Products that are known to be symmetric: fewer operations, the same numbers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_eopt.math import products, scratch, symmetric
from megatron_eopt.math.algorithm import AlgorithmT
from megatron_eopt.math.coefficients import resolve_coefficients
from megatron_eopt.math.orthogonalize import Orthogonalization
from megatron_eopt.math.precision import PrecisionT
from megatron_eopt.math.products import like_a_gpu
from megatron_eopt.math.symmetric import symmetric_product
from tests.unit.math.spectra import NAMED, oracle, relative_error

SHAPES = [(32, 48), (3, 32, 48), (32, 32), (20, 40)]


@pytest.fixture
def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "panel_width", lambda m, n, dtype: 8)


@pytest.fixture(params=[True, False], ids=["tiles", "vectors"])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Multiply in 16 bits as one or the other CPU does; return whether it has tiles."""
    tiles: bool = request.param
    # wide copies are test_products.py's
    monkeypatch.setattr(products, "has_instructions", lambda dtype: True)
    for module in (symmetric, scratch):
        monkeypatch.setattr(
            module, "multiplies_by_tiles", lambda dtype: dtype.itemsize == 2 and tiles
        )
    return tiles


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def assert_mirrored(product: torch.Tensor, width: int) -> None:
    """Look at all but panels' own squares, which libraries may sum in another order each side."""
    panel = torch.arange(product.shape[-1]) // width
    apart = panel[:, None] != panel
    assert apart.any()
    assert torch.equal(product[..., apart], product.mT[..., apart])


def flops(work: object) -> int:
    with FlopCounterMode(display=False) as counter:
        work()  # type: ignore[operator]
    return counter.get_total_flops()


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_with_itself_is_mirrored_to_the_bit(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    product = symmetric_product(x, x)
    torch.testing.assert_close(product, x @ x.mT)
    assert_mirrored(product, 8)


@pytest.mark.usefixtures("cut_small", "processor")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_polynomial_may_be_written_over_its_addend(
    dtype: torch.dtype, batch: tuple[int, ...]
) -> None:
    x = normal(*batch, 32, 40, dtype=dtype) / 8
    a = x @ x.mT
    expected = 1.5 * a.double() - 0.25 * a.double() @ a.double()
    out = a.clone()
    assert symmetric_product(a, a.mT, out, beta=1.5, alpha=-0.25, out=out) is out
    # a result is rounded once, and in 16 bits its product before
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.usefixtures("cut_small", "processor")
@pytest.mark.parametrize(("m", "n", "panels"), [(32, 48, 4), (24, 40, 3), (8, 40, 1), (4, 40, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_of_the_operations_and_the_diagonal_are_left(
    m: int, n: int, panels: int, dtype: torch.dtype
) -> None:
    x = normal(m, n, dtype=dtype)
    assert flops(lambda: symmetric_product(x, x)) == (1 + 1 / panels) / 2 * 2 * m * m * n


@pytest.mark.parametrize(
    ("m", "n", "panels"), [(512, 2048, 4), (256, 1024, 2), (1024, 64, 1), (256, 256, 1)]
)
def test_small_panels_are_not_worth_it(m: int, n: int, panels: int) -> None:
    x = torch.empty(m, n, device="cpu").fill_(1.0)
    assert flops(lambda: symmetric_product(x, x)) == (1 + 1 / panels) / 2 * 2 * m * m * n
    with like_a_gpu():
        assert flops(lambda: symmetric_product(x, x)) == 2 * m * m * n


@pytest.mark.parametrize(("m", "n"), [(512, 512), (320, 1280), (1024, 4096)])
def test_in_16_bits_panels_depend_on_the_processor(
    m: int, n: int, processor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    dtype = torch.bfloat16
    assert (symmetric.panel_width(m, n, dtype) < m) != processor
    assert symmetric.taken_alone(m, n, dtype) != processor
    # one panel beside the diagonal's saves too little
    assert symmetric.panel_width(256, 1024, dtype) == 256
    assert symmetric.panel_width(2048, 2048, dtype) == 256


def test_threads_share_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "multiplies_by_tiles", lambda dtype: False)
    widths = {}
    for threads in (1, 2, 8, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        sizes = (512, 1024, 2048)
        widths[threads] = [symmetric.panel_width(m, m, torch.bfloat16) for m in sizes]
    assert widths == {
        1: [128, 256, 256],
        2: [512, 256, 256],
        8: [512, 256, 256],
        16: [512, 1024, 256],
    }


@pytest.mark.parametrize(
    ("known", "tiles"),
    [
        ({"avx512_bf16": True, "amx_tile": False}, False),
        ({"avx512_bf16": True, "amx_tile": True}, True),
        ({"avx512_bf16": False}, True),
        ({}, True),
    ],
)
def test_tiles_are_what_is_not_known_to_be_vectors(
    known: dict[str, bool], tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    ask = products.multiplies_by_tiles.__wrapped__
    assert ask(torch.bfloat16) == tiles
    assert ask(torch.float16)
    assert not ask(torch.float32)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_a_matrix_has_the_same_bits_alone_and_in_a_batch(
    algorithm: AlgorithmT, precision: PrecisionT, tall: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric, "panel_width", lambda m, n, dtype: 16)
    compute = Orthogonalization(algorithm=algorithm, precision=precision)
    x = normal(3, 64, 128, dtype=compute.stack_dtype)
    if tall:
        x = x.mT.contiguous()
    together = compute(x)
    for i, matrix in enumerate(x):
        alone = compute(matrix)
        # of one library's calls for a batch and for a matrix bits need not be the same
        if precision == "medium" and not symmetric.multiplies_by_tiles(torch.bfloat16):
            assert torch.equal(together[i], alone)
            assert torch.equal(compute(x[i : i + 1])[0], alone)
        assert relative_error(together[i], alone.double()) < 0.05


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("width", [8, 12, 19, 20, 32])
def test_panels_that_do_not_divide_a_matrix(
    dtype: torch.dtype, batch: tuple[int, ...], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(*batch, 20, 70, dtype=dtype)
    exact = x.double() @ x.double().mT
    monkeypatch.setattr(symmetric, "panel_width", lambda m, n, dtype: width)
    product = symmetric_product(x, x)
    if width < 20:
        assert_mirrored(product, width)
    # sums of 70 products are in float32, and the result is rounded once
    torch.testing.assert_close(
        product.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=100 * 2**-23
    )


@pytest.mark.parametrize("spectrum", NAMED)
@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("schedule", [("simple", 5), ("quintic", 5), ("deepseekv4", 10)])
def test_the_iteration_is_as_accurate(
    spectrum: str,
    algorithm: str,
    precision: PrecisionT,
    schedule: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = NAMED[spectrum](64, 256)
    reference = oracle(x, resolve_coefficients(*schedule))
    compute = Orthogonalization(*schedule, algorithm=algorithm, precision=precision)  # type: ignore[arg-type]
    plain = relative_error(compute(x), reference)
    monkeypatch.setattr(symmetric, "panel_width", lambda m, n, dtype: 16)
    # both are rounding noise, which differs between libraries
    assert relative_error(compute(x), reference) <= 1.5 * plain + 1e-6
