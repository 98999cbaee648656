"""Optimizers that draw random numbers: copies of a weight stay equal, whatever else is drawn."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.optimizers.draws import draw_alike
from tests.harness import run_ranks
from tests.unit.fsdp2.model import config, eager, make_model, set_gradients, weights
from tests.unit.stores import full_state
from tests.unit.stores.full_state import Case
from tests.unit.stores.runs import DENSE

REPLICATED = {"use_distributed_optimizer": False}


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
    case = Case("psgd_pro", DENSE, ddp=storage, config=storage)
    ours, others = run_ranks(2, steps_of_megatron, case)
    assert all(map(torch.equal, ours[0], others[0]))
    # nobody else's random numbers are touched
    for rank, (_, drawn) in enumerate((ours, others)):
        torch.manual_seed(3)
        for _ in range(3):
            draw(rank)
        assert torch.equal(drawn, draw(0))


class Drawing(torch.optim.SGD):
    """Draws a number for each parameter with a gradient, and counts nothing."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("drawn", []).append(float(torch.rand(())))


def test_each_step_draws_other_numbers_and_parameters_draw_by_their_shapes():
    def drawn(*shapes: tuple[int, ...]) -> list[list[float]]:
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        optimizer = Drawing([{"params": params[:1]}, {"params": params[1:]}])
        draw_alike(optimizer)
        for step in range(3):
            params[0].grad = torch.zeros(shapes[0])
            params[-1].grad = torch.zeros(shapes[-1]) if step else None
            before = torch.get_rng_state()
            optimizer.step()
            assert torch.equal(before, torch.get_rng_state())
        assert [optimizer.state[param]["step"] for param in params] == [3, 2]
        return [optimizer.state[param]["drawn"] for param in params]

    first, second = drawn((2, 3), (3, 2))
    assert len(set(first + second)) == 5
    # one that rests draws where it left off, wherever it is among the others
    assert drawn((3, 2), (2, 3)) == [[*second, drawn((3, 2), (3, 2))[0][2]], first[:2]]


class CountingInGroups(Drawing):
    """Counts its steps in its groups too, as Prodigy does."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


def test_what_a_step_writes_to_its_group_is_written_once():
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    optimizer = CountingInGroups([{"params": params[:3]}, {"params": params[3:]}])
    draw_alike(optimizer)
    for param in params[:2]:
        param.grad = torch.zeros(2)
    optimizer.step()
    optimizer.step()
    # all of the second group rest
    assert [group.get("k") for group in optimizer.param_groups] == [2, None]
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]


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
