"""Products that finish themselves and compute half of symmetric results, against torch."""

from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.base import gpu
from megatron_eopt.math import products
from megatron_eopt.math.newton_schulz import multiply_add, symmetric
from megatron_eopt.math.orthogonalize import orthogonalize
from tests.harness.kernels import interpreted_kernels
from tests.unit.math.spectra import NAMED, few_rows, one_column, relative_error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SPECTRA = {**NAMED, "few_rows": few_rows, "one_column": one_column}
SETS = (("simple", 5), ("quintic", 5), ("polar_express", 5), ("polar_express", 8))
SETS += (("aol", 4), ("aol", 5), ("deepseekv4", 10))
SIZES = [(1, 1), (5, 3), (70, 33), (128, 64), (130, 200), (256, 128)]


def integers(seed, *shape, dtype=F16):
    """Return small integers, of which every sum of products is exact in float32."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=numbers).to(dtype)


def by_kernel(function, *args, **kwargs):
    with interpreted_kernels():
        return function(*args, **kwargs)


def exact(left, right, add, alpha, beta, diagonal):
    total = alpha * (left.double() @ right.double()) + beta * add.double()
    total.diagonal(0, -2, -1).add_(diagonal)
    return total.to(left.dtype)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(("m", "k"), SIZES)
def test_a_symmetric_product_has_the_bits_of_the_whole_one(m, k, batch, dtype):
    wide = integers(1, *batch, m, k, dtype=dtype)
    tall = integers(1, *batch, k, m, dtype=dtype)
    square = integers(2, *batch, m, m, dtype=dtype)
    square = square + square.mT
    numbers = {"alpha": 0.5, "beta": 2.0, "diagonal": 4.0}
    for left in (wide, tall.mT):
        found = by_kernel(symmetric, left, left.mT, square, **numbers)
        assert torch.equal(found, exact(left, left.mT, square, 0.5, 2.0, 4.0))
        assert torch.equal(symmetric(left, left.mT, square, **numbers), found)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("m", "k"), SIZES)
def test_an_addend_and_a_factor_join_any_product(m, k, dtype):
    left, right = integers(1, 2, m, k, dtype=dtype), integers(2, 2, k, m + 7, dtype=dtype)
    add = integers(3, 2, m, m + 7, dtype=dtype)
    found = by_kernel(multiply_add, left, right, add, beta=0.5, alpha=2.0)
    assert torch.equal(found, exact(left, right, add, 2.0, 0.5, 0.0))
    out = torch.empty(2, m, m + 7, dtype=F32)
    by_kernel(products.multiply, left, right, out, alpha=0.25)
    assert torch.equal(out, 0.25 * (left.float() @ right.float()))


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("m", [5, 70, 128])
def test_the_left_factor_joins_a_product_of_square_matrices(m, is_symmetric):
    left, right, out = integers(1, 2, m, m), integers(2, 2, m, m), torch.empty(2, m, m, dtype=F16)
    if is_symmetric:
        left = right = left + left.mT
    # (left + 2 I) (right + 4 I)
    numbers = {"beta": 2.0, "gamma": 4.0, "diagonal": 8.0, "symmetric": is_symmetric}
    by_kernel(products.multiply, left, right, out, right, **numbers)
    identity = torch.eye(m).double()
    wanted = (left.double() + 2 * identity) @ (right.double() + 4 * identity)
    assert torch.equal(out, wanted.half())


def test_rounded_symmetric_products_are_symmetric():
    # which whole ones are only in exact arithmetic
    left, right = (torch.randn(200, 200).half() for _ in range(2))
    found = by_kernel(symmetric, left, right)
    assert torch.equal(found, found.mT)
    lower = (left.float() @ right.float()).tril()
    torch.testing.assert_close(found.tril().float(), lower, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("shape", [(256, 256), (256, 768), (768, 256)])
def test_iterations_by_half_products_are_as_accurate_as_by_whole_ones(name, shape):
    x = NAMED[name](*shape, 3)
    reference = orthogonalize(x.double())
    whole = relative_error(orthogonalize(x, precision="medium"), reference)
    halves = relative_error(by_kernel(orthogonalize, x, precision="medium"), reference)
    # what mirroring may add to the rounding of Gram's form; the standard form gains 3 bits
    assert halves <= (1.1 if shape[0] != shape[1] else 0.2) * whole


def rounded_once(module, function, out, left, right, add, result, numbers, is_symmetric):
    """Do what the kernel does, in float32 by torch, which takes less time than the interpreter."""
    alpha, beta, gamma, diagonal = numbers
    total = alpha * (left.float() @ right.float())
    total += 0.0 if add is None else beta * add.float()
    total += gamma * left.float() if gamma else 0.0
    if diagonal:
        total.diagonal(0, -2, -1).add_(diagonal)
    result.copy_(total.tril() + total.tril(-1).mT if is_symmetric else total)


@pytest.mark.parametrize(("name", "steps"), SETS)
def test_grams_form_is_as_accurate_by_half_products_on_every_spectrum(monkeypatch, name, steps):
    def errors(matrices, references):
        how = {"coefficients": name, "steps": steps, "algorithm": "gram", "precision": "medium"}
        results = [orthogonalize(x, **how) for x in matrices]
        return sum(map(relative_error, results, references))

    monkeypatch.setattr(gpu, "call", rounded_once)
    for spectrum, make in SPECTRA.items():
        given = [make(256, 256, seed) for seed in (0, 1, 2)]
        exact_ones = [orthogonalize(x.double(), coefficients=name, steps=steps) for x in given]
        whole = errors(given, exact_ones)
        with monkeypatch.context() as patched:
            patched.setattr(products, "serves", lambda x, dtype=None: (dtype or x.dtype) == F16)
            halves = errors(given, exact_ones)
        # one rounding of three large singular values is the whole error of a matrix of few rows
        assert halves <= (1.5 if spectrum == "few_rows" else 1.07) * whole, spectrum


@pytest.mark.parametrize(
    ("capability", "size", "taken"), [(9, 64, True), (8, 64, False), (9, 60, False)]
)
def test_quack_computes_what_it_supports(monkeypatch, capability, size, taken):
    calls = []

    def gemm_symmetric_out(left, right, out, add, *, alpha, beta):
        calls.append((alpha, beta))
        out.copy_(exact(left, right, add, alpha, beta, 0.0))

    quack = SimpleNamespace(gemm_symmetric_out=gemm_symmetric_out)
    real = products.import_module
    monkeypatch.setattr(
        products, "import_module", lambda name: quack if name.startswith("quack") else real(name)
    )
    monkeypatch.setattr(products, "find_spec", lambda name: quack)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(products, "_is_on_gpu", lambda tensor: True)
    products._has_quack.cache_clear()
    left = integers(1, size, 128)
    add = integers(2, size, size)
    add = add + add.mT
    found = by_kernel(symmetric, left, left.mT, add, beta=2.0, alpha=0.5, diagonal=4.0)
    products._has_quack.cache_clear()
    assert torch.equal(found, exact(left, left.mT, add, 0.5, 2.0, 4.0))
    assert calls == ([(0.5, 2.0)] if taken else [])
