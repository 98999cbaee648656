"""Sums of squares, of which NAMO's step is made."""

import pytest
import torch

from megatron_eopt.matrices import gated
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_namo_of_fused_weights_whose_squares_leave_float32(size):
    """Each of their matrices steps as it does alone."""
    grad = torch.randn(24, 16, generator=torch.Generator().manual_seed(7)) * size
    fused = torch.nn.Parameter(torch.ones(24, 16))
    alone = [torch.nn.Parameter(torch.ones(12, 16)) for _ in range(2)]
    settings = {"moment2_method": "namo", "fp32_matmul_prec": "highest"}
    fused.grad = grad.clone()
    TensorParallelAdaptiveMuon([fused], splits={fused: gated((24, 16))}, **settings).step()
    for param, its in zip(alone, grad.split(12), strict=True):
        param.grad = its.clone()
    TensorParallelAdaptiveMuon(alone, **settings).step()
    torch.testing.assert_close(fused, torch.cat(alone), rtol=1e-5, atol=1e-6)
