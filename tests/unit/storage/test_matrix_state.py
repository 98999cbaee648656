"""Optimizers with matrix state: whole at an owner, wherever the fragments are."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from megatron_eopt.optimizers.whole_matrix_rule import WholeMatrixRule
from tests.harness import run_ranks
from tests.harness.models import assert_same, copies_of
from tests.unit.storage import runs
from tests.unit.storage.full_state import Case, steps
from tests.unit.storage.runs import DENSE, MOE, Result, Run, deviation, inject, make_chunk
from tests.unit.wrappers.test_parity import FACTORIES


class RowNorms(torch.optim.Optimizer):
    """A user's optimizer, which knows no fragments: a number per row, and a count per group."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                norms = param.grad.norm(dim=tuple(range(1, param.dim())), keepdim=True)
                if "norms" not in self.state[param]:
                    self.state[param]["norms"] = torch.zeros_like(norms)
                mean = self.state[param]["norms"].lerp_(norms, 0.5)
                rate = group["lr"] / group["count"]
                param.sub_(param.grad / (mean + param.norm()), alpha=rate)


def bases_over(run: Run, config: Any, chunk: Any, everything: bool) -> list[Any]:
    """Build; Adam gets what is no matrix unless the optimizer under test takes everything."""
    matrices, others = runs.param_groups(run, config, chunk)
    if everything:
        return [RowNorms(matrices + others, config.lr)]
    return [RowNorms(matrices, config.lr), runs.adam_over(others, config)]


def step_with(run: Run, everything: bool) -> Result:
    chunk = make_chunk(run)
    bases = bases_over(run, runs.make_config(run), chunk, everything)
    optimizer = runs.make_optimizer(run, chunk, bases=bases)
    for step in range(run.steps):
        inject(run, chunk, step)
        optimizer.step()
    owned = [
        sum(math.prod(update_rule._shapes[index]) for index in update_rule.owned)
        for child in optimizer.chained_optimizers
        for update_rule in child.optimizer.update_rules
        if isinstance(update_rule, WholeMatrixRule)
    ]
    return Result(runs.weights(run, chunk), [], sum(owned))


def plainly(run: Run, everything: bool) -> Result:
    """Do the same with the torch optimizers themselves, in one process."""
    chunk = make_chunk(run)
    config = runs.make_config(run)
    optimizers = bases_over(run, config, chunk, everything)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = config.lr
    for step in range(run.steps):
        inject(run, chunk, step)
        for param in chunk.parameters():
            param.grad = param.main_grad.clone()
        if config.clip_grad:
            torch.nn.utils.clip_grad_norm_(chunk.parameters(), config.clip_grad)
        for optimizer in optimizers:
            optimizer.step()
    return Result(runs.weights(run, chunk), [])


@pytest.mark.parametrize(
    ("world", "parallel", "model"),
    [
        (2, {}, DENSE),
        (4, {"tp": 2, "etp": 2}, MOE),
        pytest.param(1, {}, DENSE, marks=pytest.mark.long),
        pytest.param(4, {"tp": 2}, DENSE, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("everything", [False, True])
def test_a_users_optimizer_gets_whole_parameters(world, parallel, model, everything):
    expected = run_ranks(1, plainly, Run(model=model), everything)[0]
    results = run_ranks(world, step_with, Run(model=model, parallel=parallel), everything)
    assert deviation(results, expected) < 2e-6
    if world == 2:
        held = [result.extra for result in results]
        # every matrix whole at one rank, and both ranks have about the same
        assert max(held) < 0.7 * sum(held)


def factorys(case: Case, factory: str) -> dict[str, torch.Tensor]:
    """Return the weights of layers after two steps of an optimizer with megatron-core's class."""
    chunk = make_chunk(case.run)
    flags = {"use_distributed_optimizer": case.run.ddp.get("use_distributed_optimizer", True)}
    config = OptimizerConfig(
        optimizer=case.optimizer, lr=0.01, min_lr=0.001, clip_grad=0.0, **flags
    )
    optimizer = FACTORIES[factory](config, [chunk])
    runs.set_lr(optimizer, config)
    steps(case, chunk, optimizer, 0, 2)
    return {name: weight for name, weight in copies_of(chunk).items() if "layers" in name}


def test_soap_updates_fused_weights_as_megatron_core_does():
    model = DENSE | {"bias": False}
    plain = Case("soap", model, ddp={"use_distributed_optimizer": False})
    expected = run_ranks(1, factorys, plain, "stock")[0]
    assert any("linear_qkv.weight" in name for name in expected)
    for world, case in ((1, plain), (1, Case("soap", model)), (2, Case("soap", model))):
        for found in run_ranks(world, factorys, case, "ours"):
            # without clipping, gradients arrive in every bit as they are in one process
            assert_same(found, expected)
