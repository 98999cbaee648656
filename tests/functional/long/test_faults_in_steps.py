"""Faults in steps: flipped bits in copies, and NaN and inf, each with an outcome that is allowed.

In replicated storage every rank has gradients and momenta, so spot checks see flips there.
"""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.harness.flips import KINDS
from tests.harness.long_results import record_faults
from tests.unit.optimizers.test_spot_checks import LAYOUTS
from tests.unit.storage.runs import BF16, FP16, OVERLAP, PLAIN, SHARDED, Run
from tests.unit.wrappers.faults import RIGHT, Fault, suffer

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

BAD = (math.nan, math.inf, -math.inf)


def count(title: str, results: list[list[str]], record_property: Any) -> Counter[str]:
    assert all(outcomes == results[0] for outcomes in results)
    found = Counter(results[0])
    record_faults(title, found, record_property)
    return found


@pytest.mark.parametrize("what", ["gradient", "momentum"])
def test_a_flip_in_one_of_three_copies(what, record_property):
    ranks, fields = LAYOUTS["replicated"]
    faults = [Fault(what, n % 3, n, KINDS[n % len(KINDS)]) for n in range(32)]
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
        Fault("gradient", rank, 7 * n, str(value), steps)
        for n, value in enumerate(BAD)
        for rank in (0, 1)
        for steps in (1, 3)
    ]
    run = Run(**LOSSES[case])
    results = run_ranks(2, suffer, run, faults, timeout=900)
    found = count(f"nan or inf on one rank in one or more steps, {case}", results, record_property)
    assert RIGHT not in found
