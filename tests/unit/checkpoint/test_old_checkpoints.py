"""Checkpoints from before state named its parameters: tests/data/before_names, Muon, two steps."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from tests.functional.saved_states import tensors_in
from tests.harness import run_ranks
from tests.unit.storage.full_state import Case, build, full_state, resume
from tests.unit.storage.runs import REPLICATED

DATA = Path(__file__).parents[2] / "data/before_names"
MODEL = {"layers": 1, "hidden": 16, "heads": 2, "query_groups": 1, "gated": True}
MODEL |= {"vocabulary": 32, "dtype": torch.bfloat16}


def loaded(storage: dict[str, Any]) -> dict[str, Any]:
    case = Case("muon", MODEL, **storage)
    return full_state(case, *resume(case, DATA / "sharded"))


@pytest.mark.parametrize(("ranks", "storage"), [(1, {}), (2, {}), (1, REPLICATED)])
def test_of_megatrons_loop(ranks, storage):
    found = run_ranks(ranks, loaded, storage)[0]
    saved = {key: value for key, value in tensors_in(DATA / "sharded").items() if "state." in key}
    assert len(saved) > 20
    for key, value in saved.items():
        key = key.replace(".param.", ".fp32_param.") if storage else key
        assert torch.equal(found[key].view(-1), value.view(-1)), key


def replicated() -> None:
    chunk, optimizer = build(Case("muon", MODEL, **REPLICATED))
    saved = torch.load(DATA / "replicated.pt", weights_only=True)
    for param, value in zip(chunk.parameters(), saved["model"], strict=True):
        param.data.copy_(value)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    for one, other in zip(optimizer.state_dict(), saved["optimizer"], strict=True):
        for number, values in other["optimizer"]["state"].items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(one["optimizer"]["state"][number][key]), value)


def test_of_megatrons_loop_in_torchs_format():
    run_ranks(1, replicated)


def test_of_an_own_loop():
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 5))
    optimizer = build_optimizer(model, EmergingOptimizerConfig(optimizer="muon", lr=0.01))
    saved = torch.load(DATA / "own_loop.pt", weights_only=True)
    assert "param_names" not in saved
    optimizer.load_state_dict(saved)
    for number, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(value, saved["state"][number][key])
