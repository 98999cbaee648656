"""With spot checks, whatever one rank alone finds in its copy has the same outcome on all ranks."""

from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.storage.runs import BF16, FP16, INSTANCES, MOE, PLAIN, SHARDED, Run
from tests.unit.wrappers.faults import LEFT_OUT, RIGHT, STOPPED, Fault, suffer

HALF = BF16["model"] | {"dtype": torch.float16}
COPIES: dict[str, tuple[int, dict[str, Any]]] = {
    "replicated": (3, {"ddp": PLAIN, "config": PLAIN}),
    "replicated, cut": (4, {"ddp": PLAIN, "config": PLAIN, "parallel": {"tp": 2}}),
    "replicated, fp16": (3, {"ddp": PLAIN, "model": HALF, "config": PLAIN | FP16}),
    "replicated experts": (
        4,
        {"ddp": PLAIN, "config": PLAIN, "parallel": {"ep": 2}, "model": MOE},
    ),
    "instances": (4, INSTANCES | {"ddp": SHARDED | INSTANCES["ddp"], "config": SHARDED}),
}
NUMBERS = ("nan", "inf", "-inf", "3e38", "exponent")
OUTCOMES = (STOPPED, LEFT_OUT, RIGHT)


def faults_of(layout: str) -> list[Fault]:
    ranks, _ = COPIES[layout]
    # two copies cannot decide which of their momenta is right
    places = ("gradient", "momentum", "product") if ranks == 3 else ("gradient",)
    cases = [(place, number) for place in places for number in NUMBERS]
    return [Fault(place, n % ranks, n, number) for n, (place, number) in enumerate(cases)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("layout", mostly_long(COPIES, "replicated", "instances"))
def test_all_ranks_do_the_same(layout, late):
    ranks, fields = COPIES[layout]
    faults = faults_of(layout)
    results = run_ranks(ranks, suffer, Run(**fields), faults, late, timeout=120)
    assert all(outcomes == results[0] for outcomes in results)
    outcome_of = dict(zip(faults, results[0], strict=True))
    assert set(results[0]) <= set(OUTCOMES)
    for fault, outcome in outcome_of.items():
        # the loss scale skips a step; a wrong product is computed again
        assert (outcome == RIGHT) == (fault.what == "product") or fault.kind == "exponent", fault


@pytest.mark.parametrize("threshold", [1e6])
def test_all_ranks_skip_a_large_norm(threshold):
    ranks, fields = COPIES["replicated"]
    config = fields["config"] | {"grad_norm_skip_threshold": threshold}
    faults = [Fault("gradient", rank, rank, number) for rank in (0, 2) for number in ("inf", "1e9")]
    results = run_ranks(ranks, suffer, Run(**fields | {"config": config}), faults, timeout=120)
    assert results == [[LEFT_OUT] * len(faults)] * ranks
