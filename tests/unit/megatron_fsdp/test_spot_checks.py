"""With spot checks, a number that one rank alone finds not finite stops all ranks."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.base.errors import NonFiniteError
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.model import eager
from tests.unit.megatron_fsdp.runs import inject, make_chunk, make_optimizer, weights
from tests.unit.megatron_fsdp.test_layouts import LAYOUTS
from tests.unit.storage.runs import Run

NUMBERS = ("nan", "inf", "3e38")


@eager
def step_with(run: Run, numbers: tuple[str, ...]) -> list[str]:
    """Do a step for each number, which becomes a gradient's on one rank; return what happened."""
    chunk = make_chunk(run)
    optimizer = make_optimizer(run, chunk)
    before, outcomes = weights(run, chunk), []
    for rank, number in enumerate(numbers):
        optimizer.zero_grad()
        inject(run, chunk, 0)
        if dist.get_rank() == rank:
            grad = next(
                param.grad.to_local()
                for name, param in chunk.named_parameters()
                if "linear" in name and param.grad is not None
            )
            grad.view(-1)[0] = float(number)
        try:
            optimizer.step()
            outcomes.append("stepped")
        except NonFiniteError as error:
            outcomes.append(str(error))
        after = weights(run, chunk)
        assert all(torch.equal(after[name][1], before[name][1]) for name in after)
    return outcomes


@pytest.mark.parametrize("layout", mostly_long(LAYOUTS, "hsdp 2 x 2"))
def test_all_ranks_raise_the_same_error(layout):
    world, run = LAYOUTS[layout]
    config = run.config | {"optimizer": "muon", "muon_check_fraction": 1.0}
    results = run_ranks(world, step_with, replace(run, config=config), NUMBERS[:world])
    assert all(outcomes == results[0] for outcomes in results)
    assert all("linear" in outcome for outcome in results[0])
