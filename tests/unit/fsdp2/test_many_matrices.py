"""Build and load take time linear in the number of matrices: a model may have 20,000 of them."""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import by_optimizer, by_torch, load

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


def loaded_calls(form: Any, optimizer: str, matrices: int) -> int:
    state = form(*stepped(optimizer, matrices))
    model = model_of(matrices)
    other = built(model, optimizer)
    return calls_of(lambda: load(form, model, other, state))


WORK = {
    "build": built_calls,
    "load": partial(loaded_calls, by_optimizer),
    "load by torch": partial(loaded_calls, by_torch),
}
OPTIMIZERS = ("muon", "adaptive_muon", "soap", "adam")


@pytest.mark.parametrize(
    ("work", "optimizer"),
    mostly_long(itertools.product(WORK, OPTIMIZERS), *((work, "muon") for work in WORK)),
)
def test_work_is_linear(work, optimizer):
    WORK[work](optimizer, 8)  # imports and caches
    few, many = (WORK[work](optimizer, matrices) for matrices in (FEW, MANY))
    assert many / few < MOST
