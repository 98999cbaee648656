"""What a dry run reports is what real runs are counted to do."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron_eopt.base.kernels import Family
from megatron_eopt.math import newton_schulz
from megatron_eopt.optimizers import scalar
from megatron_eopt.tools.dry_run import Report, dry_world, report_of
from tests.harness import run_ranks
from tests.harness.kernels import serve_all
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt
from tests.harness.tiers import mostly_long
from tests.unit.dry_run.optimizers import BF16, FSDP2, dry_optimizer, in_fsdp2
from tests.unit.storage.full_state import Case, optimizer_over
from tests.unit.storage.runs import DENSE, MOE, PLAIN, SHARDED, inject, make_chunk

CASES = {
    "dense": (2, Case("muon", DENSE | {"hidden": 64})),
    "plain": (2, Case("muon", DENSE, config=PLAIN)),
    "experts": (4, Case("muon", MOE, {"ep": 2})),
    "tensor parallel": (4, Case("muon", DENSE | BF16, {"tp": 2})),
    "pipeline": (2, Case("muon", DENSE, {"pp": 2})),
    "adaptive muon": (2, Case("adaptive_muon", DENSE)),
    "soap": (2, Case("soap", DENSE)),
    "adam": (2, Case("adam", DENSE)),
    "FSDP2": (2, FSDP2),
}


def figures(report: Report) -> tuple[Any, ...]:
    plans = [
        (item.loads, item.plan.calls, item.plan.bytes_sent, item.plan.bytes_received)
        for _, item in report.schedules
    ]
    # without kernels for it megatron-core takes the norm tensor by tensor
    phases = {phase: what for phase, what in report.phases.items() if phase.name != "norm"}
    return report.elements, plans, report.collectives, phases


KERNELS = ("passes", "normalize", "products")


class NoKernels:
    """A module whose functions do nothing, but copy: memory must have values.

    They keep nothing of what they get.
    """

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None

    def launch(self, first: Any, *others: Any) -> None:
        for out, block in zip(first, others[0], strict=True) if len(others) == 1 else ():
            out.copy_(block)


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Take the way of a GPU: 16 bits, Adam on all tensors at once, and our own operators.

    Their kernels, which no CPU has, do nothing: what is counted does not depend on values.
    """
    kernels = (*(f"math.triton_{name}" for name in KERNELS), "layouts.block_copies")
    with (
        patch.object(newton_schulz, "is_widened", lambda *_: False),
        patch.object(scalar, "detect_fake_mode", lambda: True),
        patch.object(Family, "runs", serve_all),
        patch.dict(sys.modules, {f"megatron_eopt.{name}": NoKernels() for name in kernels}),
    ):
        yield


def real(case: Case) -> tuple[tuple[Any, ...], Any]:
    if case == FSDP2:
        initialize_megatron()
        with as_on_gpus():
            report = report_of(*in_fsdp2(tiny_gpt(**FSDP2.model)))
    else:
        chunk = make_chunk(case.run)
        with as_on_gpus():
            report = report_of(optimizer_over(case, [chunk]), lambda: inject(case.run, chunk, 0))
    return figures(report), report.memory


def dry(world_size: int, case: Case) -> list[tuple[tuple[Any, ...], Any, Any]]:
    """Run every rank, one after another, in one process."""
    dist.destroy_process_group()
    found = []
    for rank in range(world_size):
        with dry_world(rank, world_size):
            report = report_of(*dry_optimizer(case))
            found.append((figures(report), report.memory, report.host_reads))
    return found


# of every kind of storage, layout and optimizer one; the others have no more to tell
@pytest.mark.parametrize("name", mostly_long(CASES, "plain", "experts", "soap", "adam", "FSDP2"))
def test_a_dry_run_is_counted_as_a_real_one(name):
    world_size, case = CASES[name]
    case = case if name == "FSDP2" else replace(case, ddp=SHARDED | case.config)
    real_ranks = run_ranks(world_size, real, case)
    dry_ranks = run_ranks(1, dry, world_size, case, cpu=False)[0]
    for (done, memory), (planned, expected, reads) in zip(real_ranks, dry_ranks, strict=True):
        assert planned == done
        for kind in ("weights", "gradients", "main_weights", "state", "buffers"):
            assert getattr(expected, kind) == getattr(memory, kind), kind
        assert expected.transient == pytest.approx(memory.transient, rel=0.05)
        assert set(reads) <= {"megatron_eopt.wrappers.gradients.read"}
