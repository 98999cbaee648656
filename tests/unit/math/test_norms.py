"""Norms as a GPU's two kernels take them, in a dry run."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron_eopt.math import norms
from megatron_eopt.math.newton_schulz import normalize
from megatron_eopt.math.orthogonalize import Orthogonalization
from megatron_eopt.tools.dry_run.counting import Amount, Counts


@pytest.mark.parametrize(("m", "n", "parts"), [(4, 4, 1), (2048, 2048, 256), (8192, 28672, 1024)])
def test_no_block_adds_up_more_than_the_most_parts(m: int, n: int, parts: int) -> None:
    with FakeTensorMode():
        x = torch.empty(3, m, n, dtype=torch.bfloat16)
        assert norms.serves(x)
        sums = norms.sums_of_squares(x)
        assert sums.shape == (3, parts)
        assert sums.dtype == torch.float64
        assert normalize(x, 1e-7, torch.float16).dtype == torch.float16
    assert not norms.serves(torch.empty(4, 4))


@pytest.mark.parametrize(("batch", "n"), [(4, 2048), (1, 8192)])
def test_few_kernels_and_bytes_are_beside_the_products(batch: int, n: int) -> None:
    """Of the standard iteration and of Gram's with one restart, on a GPU."""
    with FakeTensorMode(), Counts() as counts:
        stack = torch.empty(batch, 2048, n, dtype=torch.bfloat16)
        Orthogonalization(precision="medium").factors_(stack, None, (2048, n), (2.0,))
        total = sum(counts.phases.values(), Amount())
    assert total.kernels == 2
    # diagonals and sums of squares are the rest
    assert 0 <= total.bytes / stack.numel() - 6 < 0.01
    assert total.kernels_in_all - total.kernels <= 20
