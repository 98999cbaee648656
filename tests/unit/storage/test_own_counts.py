"""Parameters of one optimizer with different counts of steps, and names that copies share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.harness.scene import forget_megatron
from tests.unit.fsdp2.model import eager
from tests.unit.storage import full_state
from tests.unit.storage.full_state import Case, differences
from tests.unit.storage.runs import DENSE, set_lr

JOINING = "*linear_proj.weight"


def after_joining(case: Case, before: str, folder: Path) -> tuple[Any, Any]:
    """Return a run in which some matrices, whose optimizer was another, do steps 8 and 9."""
    earlier = replace(case, overrides={JOINING: before})
    full_state.save_one(earlier, folder / "before", 8)
    forget_megatron()
    chunk, optimizer = full_state.resume(case, folder / "before")
    full_state.steps(case, chunk, optimizer, 8, 10)
    return chunk, optimizer


@eager
def gone_on(case: Case, before: str, folder: Path, form: str) -> tuple[list[str], int]:
    """Return what differs after two more steps from a checkpoint, and how many counts it has."""
    chunk, optimizer = after_joining(case, before, folder)
    weights = [param.detach().clone() for param in chunk.parameters()]
    path = folder / "own"
    if form == "torch":
        optimizer.save_state_dict_to_file(str(path))
    else:
        full_state.write(case, chunk, optimizer, path)
    full_state.steps(case, chunk, optimizer, 10, 12)
    whole = full_state.full_state(case, chunk, optimizer)
    forget_megatron()
    if form == "torch":
        chunk, optimizer = full_state.build(case)
        for param, weight in zip(chunk.parameters(), weights, strict=True):
            param.data.copy_(weight)
        optimizer.load_state_dict_from_file(str(path))
        set_lr(optimizer, optimizer.config)
    else:
        chunk, optimizer = full_state.resume(case, path)
    full_state.steps(case, chunk, optimizer, 10, 12)
    found = full_state.full_state(case, chunk, optimizer)
    return differences(whole, found), sum(".step." in key for key in whole)


def adaptive(method: str) -> Case:
    fields = {"adaptive_muon_moment2_method": method, "adaptive_muon_bias_correction": True}
    return Case("adaptive_muon", DENSE, config=fields)


JOINED = {
    "AdaMuon": (adaptive("adamuon"), "adam"),
    "NorMuon": (adaptive("normuon"), "lion"),
    "NAMO": (adaptive("namo"), "lion"),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("AdaMuon", "torch_dist"),
        ("NAMO", "torch"),
        *(
            pytest.param(name, form, marks=pytest.mark.long)
            for name, form in [("AdaMuon", "torch"), ("NAMO", "torch_dist"), ("NorMuon", "torch")]
        ),
    ],
)
def test_counts_of_steps_go_on_as_they_were(tmp_path, name, form):
    case, before = JOINED[name]
    for differing, counts in run_ranks(2, gone_on, case, before, tmp_path, form):
        assert not differing
        assert counts  # which are not all the driver's
