import pytest
import torch

from megatron_eopt.math.algorithm import PRECISIONS, PrecisionT
from megatron_eopt.math.orthogonalize import orthogonalize
from tests.unit.math.spectra import gaussian, relative_error


def _stop(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(torch.get_float32_matmul_precision())


@pytest.mark.parametrize("outside", ["highest", "high", "medium"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_process_wide_setting_returns(outside: str, precision: PrecisionT) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(outside)
    try:
        orthogonalize(gaussian(4, 6), precision=precision)
        assert torch.get_float32_matmul_precision() == outside
        # "medium" is no setting of torch's here: operands are bfloat16 already
        within = "high" if precision == "high" else "highest"
        with pytest.raises(RuntimeError, match=f"^{within}$"):
            orthogonalize(gaussian(4, 6), precision=precision, reduce=_stop, whole_shape=(4, 12))
        assert torch.get_float32_matmul_precision() == outside
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_process_wide_setting_does_not_lower_highest() -> None:
    x = gaussian(64, 256)
    exact = orthogonalize(x)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(orthogonalize(x), exact)
    finally:
        torch.set_float32_matmul_precision(before)


def test_medium_computes_in_bfloat16() -> None:
    x = gaussian(64, 256)
    error = relative_error(orthogonalize(x, precision="medium"), orthogonalize(x))
    # bfloat16 keeps 8 bits: far from float32's 1e-6 and still a good update
    assert 1e-3 < error < 3e-2
