"""fp16: a resumed run has the loss scale of the saved one, and scales on as if not interrupted."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.unit.storage import full_state
from tests.unit.storage.full_state import Case, build, differences
from tests.unit.storage.runs import FP16, MOE, PLAIN, SHARDED, gradients

DYNAMIC = FP16 | {"hysteresis": 2}
SMALL = {"layers": 1, "position_embedding": "rope", "dtype": torch.float16}
EXPERTS = {**MOE, **SMALL}

HISTORIES = {"grown": ("++-+", (2048, 1, 1)), "shrunk": ("+--+", (512, 1, 0))}
"""Steps with finite (+) and infinite (-) gradients, then the scale and its two counts.

Each number differs from that of a new optimizer: (1024, 0, 2).
"""

FOLLOWING = "-++-"
"""Another count in the saved state gives another scale here."""


def case_of(storage: str, optimizer: str, model: dict[str, Any], **fields: Any) -> Case:
    kept = SHARDED if storage == "sharded" else PLAIN
    return Case(optimizer, model, ddp=kept, config={**kept, **DYNAMIC}, **fields)


def stepped(case: Case, chunk: Any, optimizer: Any, signs: str, first: int) -> list[Any]:
    """Return whether each step was done, and the scale after it."""
    found = []
    # without reduce-scatter all ranks have the same gradients
    is_mine = case.config["use_distributed_optimizer"] <= distributed.get_rank()
    for number, sign in enumerate(signs, first):
        gradients(case.run, chunk, optimizer, number)
        if sign == "-" and is_mine:
            for buffer in chunk.buffers:
                buffer.grad_data.fill_(math.inf)
        done, *_ = optimizer.step()
        found.append((done, scale_of(optimizer)))
    return found


def scale_of(optimizer: Any) -> tuple[float, int, int]:
    """Return the loss scale with its counts of finite and of infinite steps."""
    (scaler,) = {part.grad_scaler for part in optimizer.chained_optimizers}
    return float(optimizer.get_loss_scale()), scaler._growth_tracker, scaler._hysteresis_tracker


@pytest.mark.parametrize(
    ("form", "storage", "optimizer", "model"),
    [
        ("state_dict", "replicated", "muon", SMALL),
        ("torch_dist", "replicated", "muon", SMALL),
        ("torch_dist", "sharded", "muon", EXPERTS),
        pytest.param("torch_dist", "replicated", "muon", EXPERTS, marks=pytest.mark.long),
        pytest.param("torch_dist", "sharded", "adam", SMALL, marks=pytest.mark.long),
    ],
)
@on_ranks(2)
def test_a_scale_that_has_changed_goes_on(tmp_path, form, storage, optimizer, model):
    case = case_of(storage, optimizer, model)
    for name, (signs, expected) in HISTORIES.items():
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        chunk, saved = build(case)
        stepped(case, chunk, saved, signs, 0)
        assert scale_of(saved) == expected
        weights = full_state.write_as(form, case, chunk, saved, place)
        whole = stepped(case, chunk, saved, FOLLOWING, 4)
        state = full_state.full_state(case, chunk, saved)
        forget_megatron()
        chunk, loaded = full_state.resume_as(form, case, place, weights)
        assert scale_of(loaded) == expected
        assert stepped(case, chunk, loaded, FOLLOWING, 4) == whole
        assert not differences(state, full_state.full_state(case, chunk, loaded))
        forget_megatron()


def saved_only(case: Case, folder: Path) -> None:
    chunk, optimizer = build(case)
    stepped(case, chunk, optimizer, HISTORIES["grown"][0], 0)
    full_state.write(case, chunk, optimizer, folder)


def loaded_only(case: Case, folder: Path) -> tuple[float, int, int]:
    return scale_of(full_state.resume(case, folder)[1])


@on_ranks(2)
def test_a_run_in_bfloat16_leaves_it(tmp_path):
    saved_only(case_of("sharded", "muon", SMALL), tmp_path)
    forget_megatron()
    case = Case(model=SMALL | {"dtype": torch.bfloat16}, config={"bf16": True})
    assert float(full_state.resume(case, tmp_path)[1].get_loss_scale()) == 1.0


@on_ranks(2)
def test_a_run_in_float16_begins_with_its_own_where_there_is_none(tmp_path):
    in_bf16 = Case(model=SMALL | {"dtype": torch.bfloat16}, config={"bf16": True})
    full_state.save_one(in_bf16, tmp_path)
    forget_megatron()
    case = case_of("sharded", "muon", SMALL)
    assert scale_of(full_state.resume(case, tmp_path)[1]) == scale_of(full_state.build(case)[1])


BY_BUCKET = case_of("sharded", "adam", SMALL, form="dp_reshardable", stock=True)


@pytest.mark.parametrize(
    ("case", "ranks", "parallel"),
    [
        (case_of("replicated", "muon", SMALL), 2, {"tp": 2}),
        (case_of("sharded", "muon", SMALL), 2, {"tp": 2}),
        (BY_BUCKET, 1, {}),
    ],
    ids=["replicated", "sharded", "by bucket"],
)
def test_another_layout_has_it_too(tmp_path, case, ranks, parallel):
    run_ranks(2, saved_only, case, tmp_path)
    after = replace(case, parallel=parallel, stock=False)
    assert run_ranks(ranks, loaded_only, after, tmp_path) == [HISTORIES["grown"][1]] * ranks
