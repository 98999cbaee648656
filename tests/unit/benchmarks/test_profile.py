"""The profile splits time by kind of operation, and loses none of it."""

import time

import pytest
import torch

from benchmarks.profile.kinds import ARITHMETIC, COPIES, PRODUCTS, REST, WAITING, kind_of, profiled
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", PRODUCTS),
        ("aten::copy_", COPIES),
        ("aten::lerp_", ARITHMETIC),
        ("aten::linalg_vector_norm", ARITHMETIC),
        ("aten::view", REST),
        ("Optimizer.step#Muon.step", REST),
        ("c10d::allgather_", WAITING),
        ("wait", WAITING),
    ],
)
def test_kinds_of_operations(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_kind_gets_its_time() -> None:
    def work() -> None:
        x = torch.ones(512, 512, device="cpu")
        y = x @ x
        y.double().sqrt_()
        time.sleep(0.1)

    began = time.perf_counter()
    times = profiled(work)
    took = 1e3 * (time.perf_counter() - began)
    assert all(times[kind] > 0 for kind in (PRODUCTS, COPIES, ARITHMETIC))
    assert times[WAITING] == 0
    assert times[REST] >= 100
    assert sum(times.values()) <= took


def _late_rank_1() -> dict[str, float]:
    initialize_megatron()

    def work() -> None:
        if torch.distributed.get_rank() == 1:
            time.sleep(0.3)
        handle = torch.distributed.all_reduce(torch.ones(8, device="cpu"), async_op=True)
        assert handle is not None
        handle.wait()

    return profiled(work)


def test_who_is_early_waits() -> None:
    early, late = run_ranks(2, _late_rank_1, cpu=True)
    assert early[WAITING] > 200
    assert late[REST] >= 300
