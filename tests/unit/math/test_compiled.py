"""Every kernel is compiled for a GPU that is not here, down to its machine code."""

from typing import Any
from unittest import mock

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from megatron_eopt.layouts import block_copies
from megatron_eopt.math import triton_normalize, triton_passes, triton_products

FP32, FP64, BF16 = tl.float32, tl.float64, tl.bfloat16
TABLES, NUMBER = (MockTensor(torch.int32), MockTensor(torch.int64)), MockTensor(torch.float32)
X, OUT, SUMS = MockTensor(torch.bfloat16), MockTensor(torch.float16), MockTensor(torch.float64)
ROUNDED: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
MIX = (FP32, BF16, FP32, None, FP64)
ADAM = (FP32, FP32, FP32, BF16, FP32, FP32)
KERNELS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "mix": (triton_passes.mix, (*TABLES, 5, NUMBER, (0.5,) * 3, None, MIX), ROUNDED),
    "update": (
        triton_passes.update,
        (*TABLES, 5, NUMBER, (0.5,) * 2, None, (FP32, BF16, BF16)),
        ROUNDED,
    ),
    "adam": (triton_passes.adam, (*TABLES, 5, NUMBER, (0.5,) * 8, None, ADAM), ROUNDED),
    "live": (triton_passes.mix, (*TABLES, 5, NUMBER, (), SUMS, MIX), ROUNDED),
    "live update": (
        triton_passes.update,
        (*TABLES, 5, NUMBER, (), SUMS, (FP32, BF16, BF16)),
        ROUNDED,
    ),
    "live adam": (triton_passes.adam, (*TABLES, 5, NUMBER, (), SUMS, ADAM), ROUNDED),
    "copy": (block_copies._copy, (*TABLES, FP32, BF16), {"num_warps": 8}),
}


class H100:
    """What Triton asks of an update rule before it launches anything."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)


def compiled(kernel: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    with mock.patch.object(type(driver), "active", H100()):
        return kernel.warmup(*arguments, grid=(1,), **options).asm


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_lists_are_read_16_bytes_at_a_time_where_they_are_aligned(name, aligned):
    kernel, arguments, options = KERNELS[name]
    asm = compiled(kernel, *arguments, aligned, **options)
    assert asm["cubin"]
    assert ("v4" in asm["ptx"]) == aligned


def test_normalisation_compiles():
    assert compiled(triton_normalize._sum_squares, X, SUMS, 64, 32, 2, 32)["cubin"]
    assert compiled(triton_normalize._divide, X, SUMS, OUT, (0.5, 64.0), 64, 2, (2, 64))["cubin"]


@pytest.mark.parametrize(
    ("is_symmetric", "out", "gamma"), [(True, OUT, None), (True, OUT, 0.5), (False, X, None)]
)
def test_products_use_the_matrix_units(is_symmetric, out, gamma):
    strides = [number for _ in range(4) for number in (2048 * 2048, 2048, 1)]
    sizes, numbers = (2048, 2048, 2048), (0.5, 2.0, gamma, 4.0)
    flags = (is_symmetric, True, 128, 64)
    given = (OUT, OUT, OUT, out, *numbers, *sizes, *strides, *flags)
    asm = compiled(triton_products._multiply, *given, num_warps=8, num_stages=3)
    assert asm["cubin"]
    assert "wgmma.mma_async" in asm["ptx"]
    assert "st.global.v4" in asm["ptx"]
    # no register is kept in memory
    assert ".local" not in asm["ptx"]
