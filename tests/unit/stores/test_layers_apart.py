"""State that not all layers have: some are frozen, or have another optimizer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_eopt import checkpoints
from megatron_eopt.base.errors import ConfigurationError
from tests.harness import run_ranks
from tests.unit.stores.full_state import (
    Case,
    build,
    differences,
    interrupted,
    load_matched,
    save,
    sharded,
    steps,
)
from tests.unit.stores.runs import DENSE, MOE

BF16 = {"dtype": torch.bfloat16}
FIRST = "layers.0."
CASES = {
    "muon": Case("muon", DENSE | BF16, frozen=FIRST),
    "plain muon": Case(
        "muon", DENSE | BF16, config={"use_distributed_optimizer": False}, frozen=FIRST
    ),
    "adam": Case("adam", DENSE | BF16, frozen=FIRST),
    "soap": Case("soap", DENSE, frozen=FIRST),
    "experts": Case("muon", MOE, frozen="local_experts.1."),
    "two optimizers": Case("muon", DENSE, overrides={"*layers.0.mlp*weight": "adam"}),
}
FRAGMENTS = ("muon", "adam", "soap", "experts", "two optimizers")


def case_of(name: str) -> Case:
    case = CASES[name]
    return replace(
        case, ddp={"use_distributed_optimizer": case.config.get("use_distributed_optimizer", True)}
    )


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_run_goes_on_as_in_one_go(tmp_path, world):
    cases = [case_of(name) for name in CASES]
    once, resumed = run_ranks(world, interrupted, cases, str(tmp_path))[0]
    for name, one, other in zip(CASES, once, resumed, strict=True):
        assert differences(one, other) == [], name


def test_at_another_layout(tmp_path):
    cases = [case_of(name) for name in FRAGMENTS]
    saved = run_ranks(2, save, cases, str(tmp_path))[0]
    cut = [replace(case, parallel={"tp": 2}) for case in cases]
    for world, wanted in ((1, cases), (2, cut)):
        loaded = run_ranks(world, load_matched, wanted, str(tmp_path))[0]
        for name, one, other in zip(FRAGMENTS, saved, loaded, strict=True):
            assert differences(one, other) == [], name


def thawed(folder: str, case: Case) -> tuple[str, float]:
    """Train all of what was partly frozen; return the first refusal, and how far weights move."""
    chunk, optimizer = build(case)
    for param in chunk.parameters():
        param.data.mul_(3)
    optimizer.reload_model_params()
    steps(case, chunk, optimizer, 0, 2)
    Path(folder).mkdir(exist_ok=True)
    dist_checkpointing.save(sharded(case, chunk, optimizer, is_loading=False), folder)
    with pytest.raises(ConfigurationError) as refusal:
        _load(folder, replace(case, frozen=None))
    fresh = {"checkpoint_fresh_state": ("momentum_buffer", "exp_avg", "exp_avg_sq")}
    resumed, following = _load(folder, replace(case, frozen=None, config=case.config | fresh))
    before = [param.detach().float().clone() for param in resumed.parameters()]
    steps(case, resumed, following, 2, 3)
    after = (param.detach().float() for param in resumed.parameters())
    return str(refusal.value), max(
        float((a - b).abs().max()) for a, b in zip(after, before, strict=True)
    )


def _load(folder, case):
    chunk, optimizer = build(case)
    loaded = checkpoints.load(
        sharded(case, chunk, optimizer, is_loading=True),
        folder,
        fresh=case.config.get("checkpoint_fresh_state", ()),
    )
    chunk.module.module.load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    return chunk, optimizer


def test_frozen_layers_are_trained_from_what_was_saved_of_them(tmp_path):
    refusal, moved = run_ranks(1, thawed, str(tmp_path / "checkpoint"), case_of("muon"))[0]
    assert "decoder.layers" in refusal
    assert "momentum_buffer" in refusal
    # one step of Muon with a learning rate of 0.01, from the weights that were loaded
    assert moved < 0.1
