"""A parameter that has got another shape is named before a step, and nothing has changed."""

import pytest
import torch
from torch import nn

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.math.passes import adam_
from tests.unit.fsdp2.models import config, eager

OPTIMIZERS = ("muon", "adaptive_muon", "soap", "lion", "adam", "sgd")


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 8))


def step(model, optimizer):
    model(torch.arange(16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("rows", [17, 32, 1024, 8])
@pytest.mark.parametrize("name", OPTIMIZERS)
@eager
def test_a_table_of_another_size_is_named(name, rows):
    model = model_of()
    optimizer = build_optimizer(model, config(name))
    step(model, optimizer)
    weight = model[0].weight
    weight.data = torch.cat([weight.data, torch.randn(1024, 8)])[:rows]
    model(torch.arange(8)).square().mean().backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConfigurationError, match=rf"0\.weight=\({rows}, 8\): had .* \(16, 8\)"):
        optimizer.step()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", OPTIMIZERS)
@eager
def test_a_matrix_of_another_shape_is_named(name):
    model = model_of()
    optimizer = build_optimizer(model, config(name))
    step(model, optimizer)
    for weight in (model[1].weight, model[1].bias, model[2].weight):
        weight.grad = None
    # as many numbers as before
    model[1].weight.data = model[1].weight.data.reshape(8, 16)
    with pytest.raises(ConfigurationError, match=r"1\.weight=\(8, 16\): had .* \(16, 8\)"):
        optimizer.step()


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_state_of_another_size_is_named(key):
    model = model_of()
    optimizer = build_optimizer(model, config("adam"))
    step(model, optimizer)
    state = optimizer.state[model[0].weight]
    state[key] = state[key][:4]
    told = r"=\(16, 8\): does not fit its gradient and state"
    with pytest.raises(ConfigurationError, match=told):
        step(model, optimizer)


def test_gradients_of_another_size_are_noticed():
    tensors = [[torch.zeros(4)], [torch.zeros(4)], [torch.zeros(4)], [None], [torch.zeros(3)]]
    group = build_optimizer(nn.Linear(2, 2), config("adam")).param_groups[0]
    with pytest.raises(ConfigurationError, match="does not fit"):
        adam_([*tensors, [torch.zeros(())]], [], None, group)
