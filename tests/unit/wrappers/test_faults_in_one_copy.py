"""With spot checks, whatever one rank alone finds in its copy has the same outcome on all ranks."""

import itertools
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.storage.runs import BF16, FP16, INSTANCES, MOE, PLAIN, SHARDED, Run
from tests.unit.wrappers.faults import LEFT_OUT, RIGHT, Fault, suffer

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


def faults_of(layout: str) -> list[Fault]:
    ranks, _ = COPIES[layout]
    # instances do not compare what they compute, so a number that is only wrong is not seen
    numbers = NUMBERS[:-1] if layout == "instances" else NUMBERS
    # two copies cannot decide which of their momenta is right
    places = ("gradient", "momentum", "product") if ranks == 3 else ("gradient",)
    cases = [(place, number) for place in places for number in numbers]
    return [Fault(place, n % ranks, n, number) for n, (place, number) in enumerate(cases)]


@pytest.mark.parametrize(
    ("layout", "late"),
    mostly_long(
        itertools.product(COPIES, (False, True)), ("replicated", True), ("instances", False)
    ),
)
def test_all_ranks_do_the_same(layout, late):
    ranks, fields = COPIES[layout]
    faults = faults_of(layout)
    results = run_ranks(ranks, suffer, Run(**fields), faults, late, timeout=120)
    assert all(outcomes == results[0] for outcomes in results)
    for fault, outcome in zip(faults, results[0], strict=True):
        # a number that is only a little wrong may change nothing
        assert outcome != RIGHT or fault.kind == "exponent", fault


def test_all_ranks_skip_a_large_norm():
    ranks, fields = COPIES["replicated"]
    config = fields["config"] | {"grad_norm_skip_threshold": 1e6}
    faults = [Fault("gradient", rank, rank, number) for rank in (0, 2) for number in ("inf", "1e9")]
    results = run_ranks(ranks, suffer, Run(**fields | {"config": config}), faults, timeout=120)
    assert results == [[LEFT_OUT] * len(faults)] * ranks
