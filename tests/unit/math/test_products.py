"""Products that finish themselves and compute half of symmetric results, against torch."""

import importlib
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import triton.language as tl

from megatron_eopt.math import products
from megatron_eopt.math.newton_schulz import multiply_add, symmetric
from megatron_eopt.math.orthogonalize import Orthogonalization, orthogonalize
from tests.harness.kernels import checked_kernels, interpreted_kernels
from tests.unit.math.spectra import NAMED, few_rows, integers, one_column, relative_error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SPECTRA = {**NAMED, "few_rows": few_rows, "one_column": one_column}
SETS = (("simple", 5), ("quintic", 5), ("polar_express", 5), ("polar_express", 8))
SETS += (("aol", 4), ("aol", 5), ("deepseekv4", 10))
SIZES = [(1, 1), (5, 3), (70, 33), (128, 64), (128, 80), (130, 200), (256, 128)]


def by_kernel(function, *args, **kwargs):
    # sizes that are left to torch, too
    with interpreted_kernels(), mock.patch.object(products, "_WIDE", 1):
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


def tiles_of(function, count, *sizes):
    """Return row and column of the first tiles, by a function of the kernel."""
    with interpreted_kernels():
        module = importlib.import_module("megatron_eopt.math.triton_products")
        handle = importlib.import_module("triton.runtime.interpreter").TensorHandle
        # of a block there are powers of two
        block = 1 << (count - 1).bit_length()
        numbers = handle(np.arange(block, dtype=np.int32).clip(max=count - 1), tl.int32)
        numbers = tl.tensor(numbers, tl.block_type(tl.int32, [block]))
        place = getattr(module, function)(numbers, *sizes)
        rows, columns = (one.handle.data[:count].tolist() for one in place)
        return list(zip(rows, columns, strict=True))


@pytest.mark.parametrize("off", [-2, 0, 2])
def test_each_tile_of_the_lower_triangle_has_its_program(off):
    # a GPU's root is approximate; what it may be off changes the row by one
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    root = mock.patch.object(
        builder, "create_sqrt", lambda self, x: self.unary_op(x, lambda it: np.sqrt(it) + off)
    )
    with root:
        # of weights of up to 65,536 rows
        found = tiles_of("_lower_tile", 512 * 513 // 2)
    assert found == [(row, column) for row in range(512) for column in range(row + 1)]


@pytest.mark.parametrize("width", [1, 2, 5, 24])
@pytest.mark.parametrize("height", [1, 7, 8, 9, 24, 29])
def test_each_tile_has_its_program_and_neighbours(height, width):
    found = tiles_of("_any_tile", height * width, height, width)
    # groups of 8 rows, column by column
    groups = [range(first, min(first + 8, height)) for first in range(0, height, 8)]
    assert found == [(row, c) for rows in groups for c in range(width) for row in rows]


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(
    ("sizes", "is_masked"),
    [
        ((256, 128, 256), False),
        ((256, 80, 256), True),
        ((144, 128, 144), True),
        ((144, 128, 256), True),
        ((256, 128, 144), True),
    ],
)
def test_only_tiles_that_end_inside_are_masked(sizes, is_masked, is_symmetric):
    m, k, n = sizes
    if is_symmetric and m != n:
        return
    with interpreted_kernels():
        kernel = mock.MagicMock()
        module = importlib.import_module("megatron_eopt.math.triton_products")
        with mock.patch.object(module, "_multiply", kernel):
            left, right = torch.zeros(3, m, k, dtype=F16), torch.zeros(3, k, n, dtype=F16)
            out = torch.zeros(3, m, n, dtype=F16)
            products.multiply(left, right, out, symmetric=is_symmetric)
    symmetric, even, *_ = kernel[None].call_args.args[-4:]
    assert (symmetric, not even) == (is_symmetric, is_masked)


def test_rounded_symmetric_products_are_symmetric():
    # which whole ones are only in exact arithmetic
    left, right = (torch.randn(200, 200).half() for _ in range(2))
    found = by_kernel(symmetric, left, right)
    assert torch.equal(found, found.mT)
    lower = (left.float() @ right.float()).tril()
    torch.testing.assert_close(found.tril().float(), lower, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("shape", [(256, 256), (512, 256)])
def test_iterations_by_half_products_are_as_accurate_as_by_whole_ones(name, shape):
    x = NAMED[name](*shape, 3)
    reference = orthogonalize(x.double())
    whole = relative_error(orthogonalize(x, precision="medium"), reference)
    halves = relative_error(by_kernel(orthogonalize, x, precision="medium"), reference)
    # what mirroring may add to the rounding of Gram's form; the standard form gains 3 bits
    assert halves <= (1.1 if shape[0] != shape[1] else 0.2) * whole


def rounded_once(out, module, function, left, right, add, result, numbers, is_symmetric):
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

    monkeypatch.setattr(products.KERNELS, "call", rounded_once)
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
    ("shape", "served"),
    [((64, 128), True), ((576, 2880), True), ((257, 1024), False), ((1024, 1001), False)],
)
def test_sizes_that_would_be_loaded_number_by_number_are_left_to_torch(shape, served):
    with interpreted_kernels():
        x = torch.zeros(2, *shape, dtype=F16)
        assert products.serves(x) == products.serves(x.mT) == served
        # once it is 16 bits, it has memory of its own
        for wide in (x.float(), x[..., ::2].float()):
            assert products.serves(wide, F16) == served
        assert not products.serves(x.float())
        assert not products.serves(x[..., :-8])
        # an address or a stride that 16 bytes do not divide
        rows, columns = shape
        memory = torch.zeros(rows * columns + 8, dtype=F16)
        assert products.serves(memory[8:].view(shape)) == served
        assert not products.serves(memory[1:-7].view(shape))
        assert not products.serves(torch.zeros(rows, columns + 8, dtype=F16)[:, :columns])


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_a_matrix_at_any_address_is_replaced_by_the_same_factor(offset):
    memory = torch.zeros(64 * 128 + 8, dtype=BF16)
    place = memory[offset:][: 64 * 128].view(64, 128)
    with interpreted_kernels():
        compute = Orthogonalization(precision="medium")
        expected = compute(x := torch.randn(64, 128).bfloat16())
        launch = products.multiply_by_triton
        with mock.patch.object(products, "multiply_by_triton", side_effect=launch) as launched:
            compute.factors_(place.copy_(x).unsqueeze(0), None, (64, 128))
    assert torch.equal(place, expected)
    given = (operand for call in launched.call_args_list for operand in call.args)
    operands = [operand for operand in given if isinstance(operand, torch.Tensor)]
    assert operands
    assert not any(operand.data_ptr() % 16 for operand in operands)


@pytest.mark.parametrize(
    ("capability", "hip", "result", "taken"),
    [
        ((9, 0), None, torch.clone, True),
        ((10, 0), None, torch.clone, True),
        ((8, 0), None, torch.clone, False),
        ((12, 0), None, torch.clone, False),
        # an MI300
        ((9, 4), "6.4", torch.clone, False),
        # it only computes half
        ((9, 0), None, torch.tril, False),
    ],
)
def test_quack_computes_what_it_supports(monkeypatch, caplog, capability, hip, result, taken):
    calls = []

    def gemm_symmetric_out(left, right, out, add, *, alpha, beta):
        """Stand in for quack's kernel, and write what ``result`` makes of the product."""
        calls.append(left.shape[-2])
        nothing = torch.zeros_like(out)
        out.copy_(result(exact(left, right, nothing if add is None else add, alpha, beta, 0.0)))

    quack = SimpleNamespace(gemm_symmetric_out=gemm_symmetric_out)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", quack)
    monkeypatch.setattr(products, "find_spec", lambda name: quack)
    monkeypatch.setattr(torch.version, "hip", hip)

    def multiplied(left, add):
        calls.clear()
        numbers = {"beta": 2.0, "alpha": 0.5, "diagonal": 4.0}
        with mock.patch.object(products, "_WIDE", 1):
            found = symmetric(left, left.mT, add, **numbers)
        assert torch.equal(found, exact(left, left.mT, add, 0.5, 2.0, 4.0))
        return bool(calls)

    left, add = integers(1, 64, 128), integers(2, 64, 64)
    add = add + add.mT
    memory = torch.zeros(64 * 64 + 8, dtype=F16)
    # one case tells whether both halves are computed
    with checked_kernels(cases=slice(1)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        assert products.QUACK.runs(left) == taken
        assert multiplied(left, add) == taken
        # strides that 8 divides, and an address that 16 divides
        assert multiplied(left[:56], add[:56, :56]) == taken
        assert not multiplied(left[:60, :], add[:60, :60].contiguous())
        assert not multiplied(left[:, :-1].contiguous(), add)
        assert not multiplied(left, memory[1:-7].view(64, 64).copy_(add))
    said = [line for line in caplog.messages if not line.startswith("checking")]
    failed = ["symmetric products in quack" in line for line in said]
    assert failed == [True] * (result is torch.tril)
