"""Kernels reach elements whose offsets exceed 32 bits, and stacks of more than 65,535 matrices.

Memory is reserved but hardly touched. Tensors begin in its middle, so an offset that wraps around
gives wrong numbers rather than a crash.
"""

import importlib
from unittest import mock

import pytest
import torch

from megatron_eopt.math import norms, products
from tests.harness.kernels import interpreted_kernels
from tests.unit.math.spectra import integers

F16 = torch.float16
BEYOND = 2**31
STRIDE = 35 * 2**20
"""63 times it exceeds 32 bits, so the first tile's columns do."""

SIDE = 65


@pytest.fixture(scope="module")
def memory():
    return torch.empty(2 * BEYOND + SIDE * (STRIDE - BEYOND // SIDE) + 2**16, dtype=F16)


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((SIDE, SIDE), (1, STRIDE)),
        ((SIDE, SIDE), (STRIDE, 1)),
        # two strides exceed 32 bits
        ((3, 16, 16), (BEYOND // 2 + 64, 16, 1)),
    ],
    ids=["columns", "rows", "matrices"],
)
def test_products_of_columns_rows_or_matrices_far_apart(memory, shape, strides, is_symmetric):
    def far(number, values):
        place = memory.as_strided(shape, strides, BEYOND + number * 256)
        return place.copy_(values)

    left, right, add = (integers(seed, *shape) for seed in range(3))
    add = add + add.mT
    given, out = far(0, left), far(3, torch.zeros(shape))
    other = given.mT if is_symmetric else far(1, right)
    numbers = {"gamma": 0.0 if is_symmetric else 2.0, "symmetric": is_symmetric}
    with interpreted_kernels():
        products.multiply(given, other, out, far(2, add), **numbers)
    exact = left.double() @ other.double() + add + numbers["gamma"] * left
    assert torch.equal(out, exact.half())


def programs_from(first):
    """Let the interpreter's grid begin with this program."""
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    start = builder.set_grid_idx

    def later(x, y, z):
        start(x, y, z)
        builder.grid_idx = (first + x, y, z)

    return mock.patch.object(builder, "set_grid_idx", later)


@pytest.mark.parametrize("size", [BEYOND + 2**15, 2**15])
def test_norms_of_large_stacks_and_large_matrices(memory, size):
    block = 4096
    x = memory[BEYOND:]
    values = integers(3, block)
    x[BEYOND : BEYOND + block] = values
    with interpreted_kernels():
        kernels = importlib.import_module("megatron_eopt.math.triton_normalize")
        first = BEYOND // block
        sums = torch.zeros(first + 1, dtype=torch.float64)
        parts = -(-size // block)
        one = torch.ones(first // parts + 1, dtype=torch.float64)
        with programs_from(first):
            kernels._sum_squares[(1,)](x, sums, size, block, parts, block)
        assert sums[first] == values.double().square().sum()
        with programs_from(first):
            kernels._divide[(1,)](x, one, x, (1e-7, 2.0), size, 1, (1, block))
    assert torch.equal(x[BEYOND : BEYOND + block], 2 * values)


def test_passes_over_large_tensors(memory):
    weights, updates = memory[BEYOND:], memory[BEYOND + 2**15 :]
    block = slice(BEYOND, BEYOND + 2048)
    weight, update = integers(4, 2048), integers(5, 2048)
    weights[block], updates[block] = weight, update
    with interpreted_kernels():
        kernels = importlib.import_module("megatron_eopt.math.triton_passes")
        # all passes find their elements alike
        programs = torch.tensor([[0], [BEYOND // 2048]], dtype=torch.int32)
        table = torch.tensor([2 * BEYOND, weights.data_ptr(), 0, updates.data_ptr()])
        types = (kernels.TYPES[F16], None, kernels.TYPES[F16])
        kernels.update[(1,)](programs, table, 1, None, (0.0, 2.0, 0.0), types, False)
    assert torch.equal(weights[block], weight + 2 * update)


def test_copies_of_planes_and_rows_far_apart(memory):
    # strides of planes and rows, of which two exceed 32 bits, in the source and in the sink
    far, near = BEYOND // 2 + 64, 16
    places = [
        memory.as_strided((3, 3, 5), strides, BEYOND + 256 * number)
        for number, strides in enumerate(
            [(far, near, 1), (near, far, 1), (3 * near, near, 1), (3 * near, near, 1)]
        )
    ]
    values = integers(7, 3, 3, 5)
    for source, sink in ((0, 2), (1, 3), (2, 0), (3, 1)):
        places[source].copy_(values)
        places[sink].zero_()
        with interpreted_kernels():
            kernels = importlib.import_module("megatron_eopt.layouts.block_copies")
            kernels.launch([places[sink]], [places[source]])
        assert torch.equal(places[sink], values)


def test_programs_count_along_the_first_axis_only():
    # the others have at most 65,535
    with interpreted_kernels():
        function = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
        start = {"autospec": True, "side_effect": function.__getitem__}
        with mock.patch.object(function, "__getitem__", **start) as started:
            x = integers(6, 3, 8, 8)
            norms.divide(x, norms.sums_of_squares(x), 1e-7, 1.0, torch.empty_like(x))
            products.multiply(x, x, torch.empty_like(x), symmetric=False)
            products.multiply(x, x.mT, torch.empty_like(x), symmetric=True)
    assert [len(grid) for (_, grid), _ in started.call_args_list] == [1] * 4
