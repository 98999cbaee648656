"""Build and load take time linear in the number of matrices: a model may have 20,000 of them."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness.tiers import mostly_long

FEW, MANY = 100, 400

MOST = 5.0
"""Largest ratio of calls with four times as many matrices: linear work makes 4, quadratic 16."""


def model_of(matrices: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(matrices)))


def built(model: nn.Module, optimizer: str) -> Any:
    return build_optimizer(model, EmergingOptimizerConfig(optimizer=optimizer, lr=0.01))


def calls_of(work: Callable[[], object]) -> int:
    """Return how many Python and C functions are called, which does not depend on the machine."""
    count = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def built_calls(optimizer: str, matrices: int) -> int:
    model = model_of(matrices)
    return calls_of(lambda: built(model, optimizer))


def stepped(optimizer: str, matrices: int) -> tuple[nn.Module, Any]:
    model = model_of(matrices)
    found = built(model, optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    found.step()
    return model, found


def loaded_calls(optimizer: str, matrices: int) -> int:
    state = stepped(optimizer, matrices)[1].state_dict()
    other = built(model_of(matrices), optimizer)
    return calls_of(lambda: other.load_state_dict(state))


def loaded_by_torch(optimizer: str, matrices: int) -> int:
    state = get_optimizer_state_dict(*stepped(optimizer, matrices))
    model = model_of(matrices)
    other = built(model, optimizer)
    return calls_of(lambda: set_optimizer_state_dict(model, other, state))


@pytest.mark.parametrize(
    ("work", "optimizer"),
    mostly_long(
        itertools.product(
            (built_calls, loaded_calls, loaded_by_torch), ("muon", "adaptive_muon", "soap", "adam")
        ),
        *((work, "muon") for work in (built_calls, loaded_calls, loaded_by_torch)),
    ),
)
def test_work_is_linear(work, optimizer):
    work(optimizer, 8)  # imports and caches
    few, many = (work(optimizer, matrices) for matrices in (FEW, MANY))
    assert many / few < MOST
