"""NaN and inf in one rank's gradients, in one or more steps, each with an allowed outcome."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_eopt
from megatron_eopt.base.errors import NonFiniteError
from megatron_eopt.base.names import MOMENTUM
from megatron_eopt.megatron_core.buckets import finish_gathers
from megatron_eopt.wrappers.config import EmergingOptimizerConfig
from tests.harness import run_ranks
from tests.harness.long_results import record_faults
from tests.unit.storage import runs
from tests.unit.storage.runs import BF16, FP16, OVERLAP, PLAIN, SHARDED, Run, gradients, set_lr

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

STOPPED, LEFT_OUT, RIGHT = "stopped on all ranks", "left out", "right bits"


@dataclass(frozen=True)
class Fault:
    """A number in a gradient of one rank."""

    rank: int
    which: int  # which of the rank's gradients
    value: float
    steps: int  # in how many steps


def held(optimizer: Any) -> list[torch.Tensor]:
    """Return weights and state."""
    tensors = list(optimizer.get_parameters())
    for child in optimizer.chained_optimizers:
        states = child.optimizer.state.values()
        tensors += [v for state in states for v in state.values() if isinstance(v, torch.Tensor)]
    return [tensor.detach() for tensor in tensors]


def inflict(fault: Fault, optimizer: Any) -> None:
    if dist.get_rank() != fault.rank:
        return
    items = [
        item
        for child in optimizer.chained_optimizers
        for item in child.shards
        if item.start < item.stop and MOMENTUM in child.optimizer.state.get(item.main, {})
    ]
    item = items[fault.which % len(items)]
    item.param.main_grad.view(-1)[item.start] = fault.value


def suffer(run: Run, faults: list[Fault]) -> list[str]:
    """Train through each fault, then a step without; return what happened.

    Asserts that weights and state are those before the step, and right after it.
    """
    chunk = runs.make_chunk(run)
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, min_lr=0.001, **run.config)
    optimizer = megatron_eopt.get_megatron_optimizer(config, [chunk])
    set_lr(optimizer, config)

    def step(number: int, fault: Fault | None = None) -> list[torch.Tensor]:
        gradients(run, chunk, optimizer, number)
        if fault is not None:
            inflict(fault, optimizer)
        optimizer.step()
        optimizer.get_grad_norm()  # reads what the step has left unread
        finish_gathers([chunk])
        return [tensor.clone() for tensor in held(optimizer)]

    start, right, outcomes = step(0), step(1), []
    for fault in faults:
        for tensor, before in zip(held(optimizer), start, strict=True):
            tensor.copy_(before)
        outcome = RIGHT
        for _ in range(fault.steps):
            skipped = optimizer.skipped_steps
            try:
                step(1, fault)
            except NonFiniteError:
                outcome = STOPPED
            else:
                outcome = RIGHT if optimizer.skipped_steps == skipped else LEFT_OUT
        finish_gathers([chunk])
        if outcome != RIGHT:
            assert all(map(torch.equal, held(optimizer), start)), fault
            step(1)
        assert all(map(torch.equal, held(optimizer), right)), (fault, outcome)
        outcomes.append(outcome)
    return outcomes


LOSSES: dict[str, dict[str, Any]] = {
    "sharded": {"ddp": SHARDED, "config": SHARDED | {"clip_grad": 0.0}},
    "sharded, clipped": {"ddp": SHARDED, "config": SHARDED | {"clip_grad": 0.1}},
    "sharded, overlapped": {
        "ddp": SHARDED | OVERLAP,
        "config": SHARDED | {"muon_overlap_dp_comm": True},
    },
    "sharded, bf16": {"ddp": SHARDED, **BF16, "config": SHARDED | BF16["config"]},
    "replicated, clipped": {
        "ddp": PLAIN,
        "config": PLAIN | {"clip_grad": 0.1},
        "parallel": {"tp": 2},
    },
    "sharded, fp16": {
        "ddp": SHARDED,
        "model": BF16["model"] | {"dtype": torch.float16},
        "config": SHARDED | FP16 | {"loss_scale_window": 1000},
    },
}


@pytest.mark.parametrize("case", LOSSES)
def test_numbers_that_are_not_finite(case, record_property):
    faults = [
        Fault(rank, 7 * n, value, steps)
        for n, value in enumerate((math.nan, math.inf, -math.inf))
        for rank in (0, 1)
        for steps in (1, 3)
    ]
    results = run_ranks(2, suffer, Run(**LOSSES[case]), faults, timeout=900)
    assert results[0] == results[1]
    found = Counter(results[0])
    record_faults(f"nan or inf on one rank in one or more steps, {case}", found, record_property)
    assert RIGHT not in found
