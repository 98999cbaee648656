"""A host without memory ends a step on all ranks, and nothing waits for it."""

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.harness.endings import errors_of
from tests.harness.long_results import record_faults
from tests.unit.storage.full_state import Case, build, steps

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

SHARDED = {"use_distributed_optimizer": True}
OFF_LOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
MODEL = {"layers": 1, "hidden": 1024, "heads": 4, "query_groups": 2, "dtype": torch.bfloat16}
CASES = {
    "resident": Case("muon", MODEL, ddp=SHARDED),
    "off-loaded": Case("muon", MODEL, ddp=SHARDED, config=OFF_LOADED),
}


@contextmanager
def without_more_memory(mb: int) -> Iterator[None]:
    """Let this process have only so much more memory in a block."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + (mb << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def suffer(case: Case, victim: int, mb: int) -> None:
    chunk, optimizer = build(case)
    with without_more_memory(mb if distributed.get_rank() == victim else 1 << 20):
        steps(case, chunk, optimizer, 0, 2)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end(name, record_property):
    outcomes = Counter()
    for victim, mb in ((0, 0), (1, 0), (1, 16)):
        errors = errors_of(suffer, CASES[name], victim, mb, limit_s=300.0, cpu=True)
        assert errors is not None, (victim, mb)
        # one that cannot even say so is ended by the system
        assert errors.keys() | {victim} == {0, 1}, (victim, mb, errors)
        assert "memory" in errors.get(victim, "memory").lower(), errors
        outcomes["stopped on all ranks with an error"] += 1
    record_faults(f"no memory on one rank in a step, {name}", outcomes, record_property)
