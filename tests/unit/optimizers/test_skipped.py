"""What the device skips, because the norm is not finite, changes nothing and does not count."""

import copy
import math

import torch
from torch import nn

from megatron_eopt import TensorParallelMuon


def test_a_step_with_a_coefficient_of_nan_changes_nothing():
    torch.manual_seed(1)
    param = nn.Parameter(torch.randn(8, 6))
    optimizer = TensorParallelMuon([param], momentum_dtype="bf16")  # its noise follows a count
    param.grad = torch.randn(8, 6)
    optimizer.step()
    before, weight = copy.deepcopy(optimizer.state[param]), param.detach().clone()
    assert int(before["step"]) == 1
    for rule in optimizer._rules():
        rule.scale_gradients(torch.tensor(math.nan))
        rule.step(optimizer.param_groups, optimizer.state)
    assert torch.equal(param, weight)
    for key, value in before.items():
        now = torch.as_tensor(optimizer.state[param][key])
        assert torch.equal(now, torch.as_tensor(value)), key
