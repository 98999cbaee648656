"""Faults in steps: flipped bits in copies, and NaN and inf, each with an outcome that is allowed.

In replicated storage every rank has gradients and momenta, so spot checks see flips there.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.base.errors import NonFiniteError
from megatron_eopt.base.names import MOMENTUM
from megatron_eopt.storage.interface import finish_gathers
from tests.harness import run_ranks
from tests.harness.flips import KINDS, flip_
from tests.harness.long_results import record_faults
from tests.unit.optimizers.test_spot_checks import LAYOUTS, build, held, listening, put_back, same
from tests.unit.storage.runs import BF16, FP16, OVERLAP, PLAIN, SHARDED, Run, gradients

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

BAD = (math.nan, math.inf, -math.inf)


@dataclass(frozen=True)
class Fault:
    """What happens to a run, on one rank."""

    what: str  # "gradient", "momentum" or a number that is not finite, as text
    rank: int
    which: int  # which of the rank's tensors
    kind: str = ""  # of the flipped bit
    steps: int = 1  # in how many steps


def is_muons(item: Any, optimizer: Any) -> bool:
    states = (o.optimizer.state.get(item.main, {}) for o in optimizer.chained_optimizers)
    return any(MOMENTUM in state for state in states)


def inflict(fault: Fault, optimizer: Any, chunk: Any) -> None:
    if dist.get_rank() != fault.rank:
        return
    if fault.what == "momentum":
        states = [s for o in optimizer.chained_optimizers for s in o.optimizer.state.values()]
        tensors = [state[MOMENTUM] for state in states if MOMENTUM in state]
        flip_(tensors[fault.which % len(tensors)], fault.kind, fault.which)
        return
    items = [i for link in optimizer.links for i in link.storage.main_shards()]
    items = [item for item in items if item.start < item.stop and is_muons(item, optimizer)]
    item = items[fault.which % len(items)]
    grad = item.param.main_grad.view(-1)[item.start : item.stop]
    if fault.what == "gradient":
        flip_(grad, fault.kind, fault.which)
    else:
        grad[fault.which % len(grad)] = float(fault.what)


def suffer(run: Run, faults: list[Fault], **fields: Any) -> list[str]:
    """Train through each fault, then a step without; return what happened."""
    chunk, optimizer = build(run, **fields)
    gradients(run, chunk, optimizer, 0)
    assert optimizer.step()[0]
    finish_gathers([chunk])
    start = held(optimizer)
    gradients(run, chunk, optimizer, 1)
    assert optimizer.step()[0]
    finish_gathers([chunk])
    right, outcomes = held(optimizer), []
    for fault in faults:
        put_back(optimizer, start)
        outcome = ""
        for _ in range(fault.steps):
            gradients(run, chunk, optimizer, 1)
            inflict(fault, optimizer, chunk)
            with listening() as lines:
                try:
                    done = optimizer.step()[0]
                except NonFiniteError:
                    outcome = "stopped on all ranks, nothing changed"
                else:
                    outcome = "right bits" if done else "left out, nothing changed"
                    told = not lines or "spot check" in lines[0]
                    assert told
        finish_gathers([chunk])
        if outcome != "right bits":
            assert same(held(optimizer), start) or fault.what == "momentum", fault
            gradients(run, chunk, optimizer, 1)
            assert optimizer.step()[0], fault
            finish_gathers([chunk])
        assert same(held(optimizer), right), (fault, outcome)
        outcomes.append(outcome)
    return outcomes


def count(title: str, results: list[list[str]], record_property: Any) -> Counter[str]:
    assert all(outcomes == results[0] for outcomes in results)
    found = Counter(results[0])
    record_faults(title, found, record_property)
    return found


@pytest.mark.parametrize("what", ["gradient", "momentum"])
def test_a_flip_in_one_of_three_copies(what, record_property):
    ranks, fields = LAYOUTS["replicated"]
    # an exponent can make the norm of one copy inf, and that rank alone raises an error
    kinds = [kind for kind in KINDS if (what, kind) != ("gradient", "exponent")]
    faults = [Fault(what, n % 3, n, kinds[n % len(kinds)]) for n in range(24)]
    results = run_ranks(ranks, suffer, Run(**fields), faults, timeout=900)
    count(f"a bit of a {what}, one of three copies", results, record_property)


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
        Fault(str(value), rank, 7 * n, steps=steps)
        for n, value in enumerate(BAD)
        for rank in (0, 1)
        for steps in (1, 3)
    ]
    run = Run(**LOSSES[case])
    results = run_ranks(2, suffer, run, faults, timeout=900)
    found = count(f"nan or inf on one rank in one or more steps, {case}", results, record_property)
    assert "right bits" not in found
