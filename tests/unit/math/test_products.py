"""Products in 16 bits on a CPU are rounded once."""

import pytest
import torch

from megatron_eopt.math.newton_schulz import multiply_add


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_widened_product_is_rounded_once(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(*batch, 24, 40, dtype=dtype)
    add = normal(*batch, 24, 24, dtype=dtype, seed=1)
    exact = 1.5 * add.double() - 0.25 * (x.double() @ x.double().mT)
    out = add.clone()
    assert multiply_add(x, x.mT, out, beta=1.5, alpha=-0.25, out=out) is out
    # half a unit in the last place, and float32's own rounding on top
    bounds = {"rtol": 0.51 * torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(out.double(), exact, **bounds)
    alone = multiply_add(x, x.mT)
    assert alone.dtype == dtype
    torch.testing.assert_close(alone.double(), x.double() @ x.double().mT, **bounds)
