"""Optimizers that draw random numbers: copies of a weight stay equal, whatever else is drawn."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_eopt.config import registry
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.unit.fsdp2.models import config, eager, make_model, set_gradients, weights
from tests.unit.storage import full_state
from tests.unit.storage.full_state import Case
from tests.unit.storage.runs import DENSE, REPLICATED


def draw(times: int) -> Tensor:
    """Draw some numbers on the device, as dropout does, and return the last two."""
    return torch.rand_like(torch.empty(times + 2))[-2:]


def steps_of_megatron(case: Case) -> tuple[list[Tensor], Tensor]:
    """Return the weights after some steps, and what is drawn then."""
    chunk, optimizer = full_state.build(case)
    torch.cuda.manual_seed(3)
    for step in range(3):
        draw(dist.get_rank())
        full_state.steps(case, chunk, optimizer, step, step + 1)
    return [param.detach() for param in chunk.parameters()], draw(0)


@pytest.mark.parametrize("storage", [{}, REPLICATED], ids=["sharded", "replicated"])
def test_megatrons_copies_stay_equal(storage):
    case = Case("psgd_pro", DENSE, **storage)
    ours, others = run_ranks(2, steps_of_megatron, case)
    assert all(map(torch.equal, ours[0], others[0]))
    # nobody else's random numbers are touched
    for rank, (_, drawn) in enumerate((ours, others)):
        torch.manual_seed(3)
        for _ in range(3):
            draw(rank)
        assert torch.equal(drawn, draw(0))


@eager
def steps_of_fsdp2(layout: str) -> dict[str, Tensor]:
    model = make_model(layout)
    optimizer = build_optimizer(model, config("psgd_pro"))
    for step in range(3):
        draw(dist.get_rank())
        set_gradients(model, step)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("layout", ["hsdp", "tp"])
def test_fsdp2s_copies_stay_equal(layout):
    ours, *others = run_ranks(4, steps_of_fsdp2, layout, cpu=False)
    for its in others:
        assert all(torch.equal(its[name], weight) for name, weight in ours.items())


class Drawing(torch.optim.Optimizer):
    """Replaces every weight by random numbers; some classes count their steps, and some do not."""

    counts = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.copy_(torch.rand_like(param))
                if self.counts:
                    self.state[param]["step"] = self.state[param].get("step", 0) + 1


@pytest.mark.parametrize("counts", [False, True])
def test_each_step_draws_other_numbers_also_after_a_resume(monkeypatch, counts):
    monkeypatch.setattr(Drawing, "counts", counts)
    entry = registry.EmergingOptimizerEntry(Drawing, lambda *_: None, draws=True)
    monkeypatch.setitem(registry._entries, "drawing", entry)
    sizes = ((30, 40), (40, 30), (35, 40))

    def drawn(optimizer: Any, model: nn.Module, count: int) -> list[list[Tensor]]:
        """Return the weights after each step."""
        found = []
        for _ in range(count):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            found.append([param.detach().clone() for param in model.parameters()])
        return found

    def build() -> tuple[Any, nn.Module]:
        model = nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))
        return build_optimizer(model, config("drawing")), model

    optimizer, model = build()
    before = drawn(optimizer, model, 3)
    state = copy.deepcopy(optimizer.state_dict())
    assert {int(values["step"]) for values in state["state"].values()} == {3}
    after = drawn(optimizer, model, 3)
    every = torch.stack([weight.flatten()[:1200] for step in before + after for weight in step])
    noise = torch.corrcoef(every)[~torch.eye(len(every), dtype=torch.bool)]
    # a correlation of independent numbers has a standard deviation of 0.03
    assert noise.abs().max() < 0.18
    resumed, other = build()
    drawn(resumed, other, 1)
    resumed.load_state_dict(state)
    for ours, theirs in zip(drawn(resumed, other, 3), after, strict=True):
        assert all(map(torch.equal, ours, theirs))
