"""Products in 16 bits, on processors that have instructions for them and on others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt.math import products
from megatron_eopt.math.products import multiply_add

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture
def no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_instructions", lambda dtype: dtype.itemsize > 2)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Products(TorchDispatchMode):
    """Notes the operands' dtype of every product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            self.dtypes.append(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("no_instructions")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_widened_product_is_rounded_once(batch: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(*batch, 24, 40, dtype=dtype)
    add = normal(*batch, 24, 24, dtype=dtype, seed=1)
    exact = 1.5 * add.double() - 0.25 * (x.double() @ x.double().mT)
    out = add.clone()
    assert multiply_add(x, x.mT, out, beta=1.5, alpha=-0.25, out=out) is out
    # half a unit in the last place, and float32's own rounding on top
    torch.testing.assert_close(out.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5)
    alone = multiply_add(x, x.mT)
    assert alone.dtype == dtype
    torch.testing.assert_close(
        alone.double(), x.double() @ x.double().mT, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-5
    )


@pytest.mark.usefixtures("no_instructions")
def test_only_a_cpu_without_instructions_widens(monkeypatch: pytest.MonkeyPatch) -> None:
    def dtypes(make: Callable[[], torch.Tensor]) -> set[torch.dtype]:
        with Products() as seen:
            multiply_add(x := make(), x, x)
        return set(seen.dtypes)

    assert dtypes(lambda: normal(16, 16)) == {torch.float32}
    # a dry run counts what a GPU would do
    with FakeTensorMode():
        assert dtypes(lambda: torch.empty(16, 16, dtype=torch.bfloat16)) == {torch.bfloat16}
    monkeypatch.setattr(products, "has_instructions", lambda dtype: True)
    assert dtypes(lambda: normal(16, 16)) == {torch.bfloat16}
