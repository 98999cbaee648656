"""How many flipped bits spot checks see, and that clean steps raise no alarm."""

from collections import Counter
from typing import Any

import pytest
import torch

from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.harness.flips import KINDS, PLACES, Flip
from tests.harness.log import listening
from tests.unit.fsdp2.model import config, eager, make_model, set_gradients
from tests.unit.optimizers.test_spot_checks import LAYOUTS, build, stepped
from tests.unit.storage.runs import DENSE, Run, gradients

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

FLIPS, STEPS = 200, 2000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_200_flips(place, kind, record_property):
    ranks, fields = LAYOUTS["sharded"]
    # a check has one message to those who compute, and one back
    calls = 2 if place == "message" else 4
    flips: list[Flip | None] = [
        Flip(place, kind, n % ranks, n // ranks % calls, n) for n in range(FLIPS)
    ]
    _, *outcomes = zip(*run_ranks(ranks, stepped, Run(**fields), flips, timeout=3000), strict=True)
    found: Counter[str] = Counter()
    for of_ranks in outcomes:
        assert any(o["flipped"] for o in of_ranks)
        # seen, it has changed nothing; not seen, weights and state are those of a step without it
        assert all(o["unchanged"] if o["error"] else o["right"] for o in of_ranks)
        found["seen" if of_ranks[0]["error"] else "rounded away"] += 1
    counts = ", ".join(f"{count} {what}" for what, count in sorted(found.items()))
    record_property(f"fault: a {kind} bit of a {place}", counts)
    assert place != "product" or found["seen"] == FLIPS


def clean(run: Run, steps: int) -> list[str]:
    chunk, optimizer = build(run)
    with listening() as lines:
        for step in range(steps):
            gradients(run, chunk, optimizer, step)
            assert optimizer.step()[0]
    return lines


@eager
def clean_in_fsdp(steps: int) -> list[str]:
    model = make_model("fsdp")
    optimizer: Any = build_optimizer(model, config(muon_check_fraction=1.0))
    with listening() as lines:
        for step in range(steps):
            set_gradients(model, step)
            optimizer.step()
    assert all(torch.isfinite(param.to_local()).all() for param in model.parameters())
    return lines


@pytest.mark.parametrize("layout", ["sharded", "replicated", "fsdp"])
def test_2000_clean_steps_raise_no_alarm(layout, record_property):
    if layout == "fsdp":
        alarms = run_ranks(4, clean_in_fsdp, STEPS, timeout=3000)
    else:
        ranks, fields = LAYOUTS[layout]
        run = Run(**fields, model=DENSE | {"layers": 1})
        alarms = run_ranks(ranks, clean, run, STEPS, timeout=3000)
    assert not any(alarms)
    record_property(f"false alarms in {STEPS} steps, {layout}", 0)
