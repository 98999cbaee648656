"""Norms as a GPU's two kernels take them, by Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron_eopt.dry_run.counting import Amount, Counts
from megatron_eopt.math import norms
from megatron_eopt.math.newton_schulz import normalize
from megatron_eopt.math.orthogonalize import Orthogonalization

INTERPRETED = """
import torch
from megatron_eopt.base import gpu
from megatron_eopt.math import norms
from megatron_eopt.math.newton_schulz import normalize

generator = torch.Generator().manual_seed(0)


def results(x, eps, dtype, **more):
    found = []
    for runs in (False, True):
        gpu.runs_kernels = lambda tensor: runs
        found.append(normalize(x.clone(), eps, dtype, **more))
    return found


for shape in [(6, 10), (3, 6, 10), (2, 3, 6, 10), (5, 130, 260), (0, 4, 6)]:
    for given in (torch.float32, torch.bfloat16, torch.float16):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(shape, generator=generator).to(given)
            theirs, ours = results(x, 1e-7, dtype, norm=64.0)
            # float32 sums in another order, and one rounding
            bound = max(torch.finfo(dtype).eps, 4e-7)
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=bound, atol=0)

# more chunks than one; norms below eps, and squares that only float64 holds
x = torch.randn(2, 300, 400, generator=generator)
for scale, eps in ((1.0, 1e-7), (1e-9, 1e-7), (1e-25, 1e-30), (1e25, 1e-30), (0.0, 1e-7)):
    theirs, ours = results(scale * x, eps, torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)

# ranks that hold half of the columns each
halves = [half.contiguous() for half in x.split(200, -1)]
gpu.runs_kernels = lambda tensor: True
sums = [norms.sums_of_squares(h, False).sum(-1, True, dtype=torch.float64) for h in halves]
parts = [normalize(h, 1e-7, torch.float32, lambda s: sum(sums)) for h in halves]
whole = normalize(x, 1e-7, torch.float32)
torch.testing.assert_close(torch.cat(parts, -1), whole, rtol=1e-6, atol=0)

# what cannot be divided by stays with its matrix; a place may be the input's
x = torch.randn(3, 6, 10, generator=generator).bfloat16()
expected = normalize(x, 1e-7, torch.float16)
place = x.clone()
assert torch.equal(normalize(place, 1e-7, torch.float16, out=place.view(torch.float16)), expected)
x[1] = float("nan")
got = normalize(x, 1e-7, torch.float16)
assert torch.equal(got[[0, 2]], expected[[0, 2]])
assert got[1].isnan().all()
"""


def test_the_kernels_give_what_torch_gives() -> None:
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("m", "n", "parts"), [(4, 4, 1), (2048, 2048, 256), (8192, 28672, 1024)])
def test_no_block_adds_up_more_than_the_most_parts(m: int, n: int, parts: int) -> None:
    with FakeTensorMode():
        x = torch.empty(3, m, n, dtype=torch.bfloat16)
        assert norms.serves(x)
        sums = norms.sums_of_squares(x, careful=False)
        assert sums.shape == (3, parts)
        assert sums.dtype == torch.float32
        assert normalize(x, 1e-7, torch.float16).dtype == torch.float16
    assert not norms.serves(torch.empty(4, 4))


@pytest.mark.parametrize(
    ("batch", "n", "kernels", "bytes_an_element"), [(4, 2048, 2, 6), (1, 8192, 8, 10)]
)
def test_few_kernels_and_bytes_are_beside_the_products(
    batch: int, n: int, kernels: int, bytes_an_element: int
) -> None:
    """Of the standard iteration and of Gram's with one restart, on a GPU."""
    with FakeTensorMode(), Counts() as counts:
        stack = torch.empty(batch, 2048, n, dtype=torch.bfloat16)
        Orthogonalization(precision="medium").factors_(stack, None, (2048, n), (2.0,))
        total = sum(counts.amounts.values(), Amount())
    assert total.kernels == kernels
    # diagonals and sums of squares are the rest
    assert 0 <= total.bytes / stack.numel() - bytes_an_element < 0.01
    assert total.kernels_in_all - kernels <= 20
