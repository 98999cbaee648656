import itertools
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch

from megatron_eopt.math.algorithm import PrecisionT
from megatron_eopt.math.orthogonalize import orthogonalize
from megatron_eopt.math.precision import matmul_precision
from tests.unit.math.spectra import gaussian, relative_error

KEYS = (
    *(("generic", "all"), ("cuda", "all"), ("mkldnn", "all")),
    *((backend, what) for backend in ("cuda", "mkldnn") for what in ("matmul", "conv")),
)


def new(*key: str) -> Any:
    return torch._C._get_fp32_precision_getter(*key)


def set_new(backend: str, operation: str, value: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operation, value)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Restore torch's initial settings."""
    yield
    torch.set_float32_matmul_precision("highest")
    for key in KEYS:
        set_new(*key, "tf32" if key == ("cuda", "conv") else "none")


def settings() -> list[Any]:
    """Return all settings as read now, and below parents that are changed for a moment."""
    found: list[Any] = []
    for parent in (None, ("generic", "all"), ("cuda", "all"), ("mkldnn", "all")):
        before = parent and new(*parent)
        for value in ("ieee", "tf32") if parent else ("",):
            if parent:
                set_new(*parent, value)
            found.append([new(*key) for key in KEYS if key != parent])
        if parent:
            # none of these tests sets a parent below the root
            set_new(*parent, before if parent[0] == "generic" else "none")
    try:
        found.append(torch.get_float32_matmul_precision())
    except RuntimeError:
        found.append("mixed")
    return found


def _stop(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(torch.get_float32_matmul_precision())


OLD = [("old", value) for value in ("highest", "high", "medium")]
NEW = [
    *((("generic", "all"), value) for value in ("ieee", "tf32")),
    *((("cuda", "matmul"), value) for value in ("ieee", "tf32")),
    *((("mkldnn", "matmul"), value) for value in ("ieee", "bf16")),
]
ORDERS = [(), *((one,) for one in OLD + NEW), *itertools.permutations(OLD[1:] + NEW[1::2], 2)]


def choose(chosen: Any) -> None:
    """Choose precisions by torch's old setting and its new ones, in this order."""
    for key, value in chosen:
        if key == "old":
            torch.set_float32_matmul_precision(value)
        else:
            set_new(*key, value)


@pytest.mark.parametrize("chosen", ORDERS, ids=str)
def test_the_process_wide_settings_return(chosen: Any) -> None:
    exact = orthogonalize(gaussian(64, 256))
    choose(chosen)
    before = settings()
    for precision in get_args(PrecisionT):
        result = orthogonalize(gaussian(64, 256), precision=precision)
        assert settings() == before
        assert precision != "highest" or torch.equal(result, exact)
        # "medium" is no setting of torch's here: operands are bfloat16 already
        within = "high" if precision == "high" else "highest"
        with pytest.raises(RuntimeError, match=f"^{within}$"):
            orthogonalize(gaussian(4, 6), precision=precision, reduce=_stop, whole_shape=(4, 12))
        assert settings() == before


@pytest.mark.parametrize("chosen", ORDERS, ids=str)
def test_without_a_precision_that_of_the_caller_applies(chosen: Any) -> None:
    choose(chosen)
    products = [new(backend, "matmul") for backend in ("cuda", "mkldnn")]
    with matmul_precision():
        assert [new(backend, "matmul") for backend in ("cuda", "mkldnn")] == products
        # emerging-optimizers sets and restores the old one
        torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())


def test_medium_computes_in_bfloat16() -> None:
    x = gaussian(64, 256)
    error = relative_error(orthogonalize(x, precision="medium"), orthogonalize(x))
    # bfloat16 keeps 8 bits: far from float32's 1e-6 and still a good update
    assert 1e-3 < error < 3e-2


@pytest.mark.parametrize("before", [True, False])
def test_products_of_float16_are_summed_in_float32(before):
    cuda = torch.backends.cuda.matmul
    cuda.allow_fp16_reduced_precision_reduction = before
    with matmul_precision("highest"):
        assert not cuda.allow_fp16_reduced_precision_reduction
    assert cuda.allow_fp16_reduced_precision_reduction is before
    cuda.allow_fp16_reduced_precision_reduction = True
