"""A dry step creates state, and leaves parameters, gradients and groups as they were."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.config.settings import resolve
from megatron_eopt.optimizers.scalar import build_scalar_optimizer
from megatron_eopt.optimizers.update_rule import dry_step


class Counting(torch.optim.Optimizer):
    """Keeps state of its own kind, and counts and changes settings in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["lr"] *= 0.5
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["kept"] = param.grad + 1
                    param.sub_(1)


def test_only_state_is_new():
    params = [torch.ones(2), torch.ones(3)]
    params[0].grad = torch.full((2,), 7.0)
    optimizer = Counting(params, {"lr": 0.1, "count": 5})
    optimizer.state[params[0]]["kept"] = torch.zeros(2)
    dry_step(optimizer)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["count"]) == (0.1, 5)
    assert [param.tolist() for param in params] == [[1.0] * 2, [1.0] * 3]
    assert params[0].grad.tolist() == [7.0] * 2
    assert params[1].grad is None
    # state that exists is not touched
    assert optimizer.state[params[0]]["kept"].tolist() == [0.0] * 2
    assert optimizer.state[params[1]]["kept"].shape == (3,)


def test_what_cannot_step_with_zero_gradients_is_told_so():
    class Failing(Counting):
        def step(self, closure=None):
            raise ZeroDivisionError("norm is 0")

    param = torch.ones(2)
    with pytest.raises(ConfigurationError, match=r"failed with zero gradients: norm is 0"):
        dry_step(Failing([param], {"lr": None, "count": 0}))
    assert param.grad is None


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_on_fake_tensors_torch_works_as_on_a_gpu(name, plain):
    settings = resolve(EmergingOptimizerConfig(optimizer=name, lr=0.1, fused_adam=False))
    chosen = []
    for mode in (nullcontext(), FakeTensorMode()):
        with mode:
            made = build_scalar_optimizer(name, settings, [torch.ones(2)], plain=plain)
        chosen.append(made.defaults["foreach"])
    assert chosen == [None, None if plain else True]
