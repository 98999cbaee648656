"""Another rounding: what it moves, by how much, and what it leaves alone."""

import subprocess
import sys

import pytest
import torch

from tests.functional.script import ROOT
from tests.harness.last_bits import LARGEST_MOVE, MOVED_OF_16_BITS, move, other_last_bits

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
KIND = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def moves(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return by how many last bits numbers have been moved."""
    kind = KIND[before.element_size()]
    return after.view(kind).long() - before.view(kind).long()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_move_by_last_bits_up_and_down_alike(dtype):
    before = gaussian(200, 200, dtype=dtype)
    after = before.clone()
    move(after, 1)
    steps = moves(before, after)
    half = before.element_size() == 2
    most = 1 if half else LARGEST_MOVE
    assert steps.abs().max() == most
    assert abs(steps.double().mean()) < 0.1
    moved = (steps != 0).double().mean()
    share = 1 / MOVED_OF_16_BITS if half else 2 * most / (2 * most + 1)
    assert moved == pytest.approx(share, rel=0.1)


def test_moves_are_a_function_of_the_number_its_place_and_the_seed():
    before = gaussian(100, 100)
    results = []
    for seed, values in ((1, before), (1, before), (2, before), (1, before.flip(0))):
        results.append(values.clone())
        move(results[-1], seed)
    assert torch.equal(results[0], results[1])
    first = moves(before, results[0]).double().ravel()
    for other in (results[2], results[3].flip(0)):
        second = moves(before, other).double().ravel()
        assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.05


def test_counts_the_smallest_numbers_and_what_is_no_number_stay():
    before = torch.tensor([0.0, -0.0, 1.0, -3.0, 2.0**30, 1e-45, -1e-44, torch.inf, -torch.inf])
    after = before.clone()
    move(after, 1)
    assert torch.equal(before.view(torch.int32), after.view(torch.int32))
    nan = torch.tensor([torch.nan])
    move(nan, 1)
    assert nan.isnan().all()


def test_sums_and_functions_move_and_exact_operations_do_not():
    a, b = gaussian(32, 32, seed=1), gaussian(32, 32, seed=2)
    inexact = {
        "product": lambda: a @ b,
        "batch": lambda: torch.bmm(a.view(2, 16, 32), b.view(2, 32, 16)),
        "sum": lambda: a.sum(0),
        "norm": lambda: torch.linalg.vector_norm(a, dim=0),
        "norms": lambda: torch.stack(torch._foreach_norm([a[0], b[0]])),
        "softmax": lambda: a.softmax(-1),
        "layer norm": lambda: torch.nn.functional.layer_norm(a, (32,)),
        "eigh": lambda: torch.linalg.eigh(a @ a.T).eigenvectors,
        "lerp": lambda: a.clone().lerp_(b, 0.3),
        "lerp of a list": lambda: _in_place(torch._foreach_lerp_, a, b, 0.3),
        "backward": lambda: torch.func.grad(lambda x: (x.exp() @ b).sum())(a),
    }
    exact = {
        "copy": lambda: a.clone(),
        "transpose": lambda: a.T.contiguous(),
        "add": lambda: a + b,
        "multiply": lambda: a.mul(b),
        "root": lambda: a.abs().sqrt(),
        "choose": lambda: torch.where(a > 0, a, b),
    }
    for name, compute in (inexact | exact).items():
        plain = compute()
        with other_last_bits(1):
            moved = compute()
        assert torch.equal(plain, moved) == (name in exact), name
        torch.testing.assert_close(plain, moved, rtol=1e-3, atol=1e-4)


def _in_place(function, a, b, weight):
    values = [a.clone()]
    function(values, [b], weight)
    return values[0]


def test_none_changes_nothing():
    a = gaussian(8, 8)
    with other_last_bits(None):
        assert torch.equal(a @ a, a @ a)


@pytest.mark.long
def test_a_script_can_be_run_that_way(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "x = torch.arange(64.0).view(8, 8) / 7\n"
        "print(sys.argv, (x @ x).view(torch.int32).sum().item())\n"
    )
    printed = []
    for command in ([str(script)], ["-m", "tests.harness.last_bits", "3", str(script)]):
        done = subprocess.run(
            [sys.executable, *command, "--flag"],
            cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
            timeout=120,
        )  # fmt: skip
        printed.append(done.stdout)
    assert printed[0].split("]")[0] == printed[1].split("]")[0]
    assert printed[0] != printed[1]
