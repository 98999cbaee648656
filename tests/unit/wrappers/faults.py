"""Steps in which one rank has a wrong gradient, momentum or product."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_eopt.base.errors import NonFiniteError, SpotCheckError
from megatron_eopt.base.names import MOMENTUM
from megatron_eopt.storage.interface import finish_gathers
from tests.harness.flips import Flip, flip_, flipping
from tests.unit.optimizers.test_spot_checks import build, held, put_back, same
from tests.unit.storage.runs import Run, gradients

STOPPED, LEFT_OUT, RIGHT = "stopped on all ranks", "left out", "right bits"


@dataclass(frozen=True)
class Fault:
    """What happens to a run, on one rank."""

    what: str  # "gradient", "momentum" or "product"
    rank: int
    which: int  # which of the rank's tensors
    kind: str  # of the flipped bit, or a number as text, which an element becomes
    steps: int = 1  # in how many steps


def _is_muons(item: Any, optimizer: Any) -> bool:
    states = (o.optimizer.state.get(item.main, {}) for o in optimizer.chained_optimizers)
    return any(MOMENTUM in state for state in states)


def inflict(fault: Fault, optimizer: Any) -> None:
    if dist.get_rank() != fault.rank or fault.what == "product":
        return
    if fault.what == "momentum":
        states = [s for o in optimizer.chained_optimizers for s in o.optimizer.state.values()]
        tensors = [state[MOMENTUM] for state in states if MOMENTUM in state]
        flip_(tensors[fault.which % len(tensors)], fault.kind, fault.which)
        return
    items = [i for link in optimizer.chained_optimizers for i in link.shards]
    items = [item for item in items if item.start < item.stop and _is_muons(item, optimizer)]
    item = items[fault.which % len(items)]
    grad = item.param.main_grad.view(-1)[item.start : item.stop]
    flip_(grad, fault.kind, fault.which)


def suffer(run: Run, faults: list[Fault], late: bool = False, **fields: Any) -> list[str]:
    """Train through each fault, then a step without; return what happened.

    Asserts that weights and state are right, or those before the step.
    """
    chunk, optimizer = build(run, **fields)
    optimizer.has_kernels = late
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
        product = Flip("product", fault.kind, fault.rank, fault.which % 4, fault.which)
        for _ in range(fault.steps):
            gradients(run, chunk, optimizer, 1)
            inflict(fault, optimizer)
            with flipping(product if fault.what == "product" else None):
                skipped = optimizer.skipped_steps
                try:
                    optimizer.step()
                    optimizer.get_grad_norm()  # reads what the step has left unread
                except (NonFiniteError, SpotCheckError):
                    outcome = STOPPED
                else:
                    outcome = RIGHT if optimizer.skipped_steps == skipped else LEFT_OUT
        finish_gathers([chunk])
        if outcome != RIGHT:
            assert same(held(optimizer), start) or fault.what == "momentum", fault
            put_back(optimizer, start)
            gradients(run, chunk, optimizer, 1)
            assert optimizer.step()[0], fault
            finish_gathers([chunk])
        assert same(held(optimizer), right), (fault, outcome)
        outcomes.append(outcome)
    return outcomes
