"""Gradients of another dtype than their weights step as if they were converted."""

import pytest
import torch

from megatron_eopt.fsdp2 import build_optimizer
from tests.unit.fsdp2.models import config, eager, make_model

OPTIMIZERS = ("muon", "adaptive_muon", "soap", "lion", "adam", "sgd")


@eager
def stepped(name, convert, every):
    model = make_model()
    optimizer = build_optimizer(model, config(name))
    for step in range(3):
        made = torch.Generator().manual_seed(step)
        for number, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=made).bfloat16()
            if convert or number % every:
                param.grad_dtype = None if convert else torch.float32
                param.grad = grad.float()
            else:
                param.grad_dtype = torch.bfloat16
                param.grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("every", [1, 2])
def test_bfloat16_gradients_of_float32_weights(name, every):
    found, expected = stepped(name, False, every), stepped(name, True, every)
    assert all(map(torch.equal, found, expected))
