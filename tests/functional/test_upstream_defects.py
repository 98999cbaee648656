"""Checkpoints: what megatron-core's optimizers get wrong, and that ours do not.

| defect | test |
|---|---|
| torch_dist asserts that state has its parameter's shape: no SOAP, no NorMuon | tests/unit/storage/test_resharding.py::test_other_layouts_load_it, tests/unit/wrappers/test_plain_checkpoint.py::test_every_kind_of_optimizer_continues, ::test_other_layouts_load_it |
| layer-wise checkpoints load at one data-parallel size only | tests/unit/storage/test_resharding.py::test_other_layouts_load_it |
| format torch with --auto-detect-ckpt-format: KeyError for a torch_dist checkpoint | tests/functional/test_cases.py::test_resume[resume-torch-from-distributed] |
| a group's identity contains the learning rate | test_another_schedule_resumes, tests/unit/wrappers/test_plain_checkpoint.py::test_resume_with_another_learning_rate |
| muon with the distributed optimizer goes on from other weights | tests/unit/checkpoint/test_state.py::test_all_ranks_compute_with_the_parameters_of_the_checkpoint |
| fully_reshardable saves shifted tensors where a bucket is padded; empty buckets are refused | tests/unit/storage/test_resharding.py::test_padded_buckets |
| distributed Adam over torch's AdamW: KeyError, or a step of 0, after loading | tests/functional/test_resume_matrix.py::test_every_optimizer_goes_on_in_every_layout |
"""  # noqa: E501

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.unit.storage import full_state
from tests.unit.storage.full_state import Case, build, differences, resume, save_one, steps
from tests.unit.storage.runs import DENSE, NORMUON, PLAIN

# without learned position embeddings, which megatron-core's Muon orthogonalizes
BF16 = {**DENSE, "query_groups": 4, "position_embedding": "rope", "dtype": torch.bfloat16}
# as many matrices as parameters, which both storages then know alike
UNFUSED = {**BF16, "gated": False}
WHOLE = {"muon_split_qkv": False, "muon_split_gated": False}


def plain(case: Case) -> Case:
    """Return the same run with whole parameters on every data-parallel rank."""
    return replace(case, ddp=PLAIN, config={**case.config, **PLAIN})


@pytest.mark.parametrize("storage", ["plain", "layer-wise"])
@on_ranks(2)
def test_another_schedule_resumes(tmp_path, storage):
    # groups of a learning rate of their own, which megatron-core finds by its number
    case = Case("muon", BF16, config={"decoupled_lr": 0.03})
    case = plain(case) if storage == "plain" else case
    saved = save_one(case, str(tmp_path))
    forget_megatron()
    other = {"lr": 0.02, "min_lr": 0.005, "weight_decay": 0.3, "decoupled_lr": 0.04}
    case = replace(case, config={**case.config, **other})
    chunk, optimizer = resume(case, str(tmp_path))
    found = [(g["max_lr"], g["min_lr"]) for g in optimizer.param_groups]
    _, new = build(case)
    assert found == [(g["max_lr"], g["min_lr"]) for g in new.param_groups], found
    assert {lr for lr, _ in found} == {0.02, 0.04}, found
    different = differences(saved, full_state.full_state(case, chunk, optimizer))
    assert not different, different


def alike(state: dict[str, Any]) -> dict[str, Any]:
    """Return a whole state under the names of the layer-wise storage.

    The plain storage keeps the step once for all parameters.
    """
    steps = {float(value) for key, value in state.items() if ".matrix_state.step." in key}
    assert steps in (set(), {2.0})
    return {
        key.replace(".fp32_param.", ".param."): value
        for key, value in state.items()
        if ".matrix_state.step." not in key
    }


def load_at(cases: list[Case], folder: str) -> list[dict[str, Any]]:
    """Load at several layouts; each must be able to go on."""
    states = []
    for case in cases:
        chunk, optimizer = resume(case, folder)
        states.append(full_state.full_state(case, chunk, optimizer))
        steps(case, chunk, optimizer, 2, 3)
        forget_megatron()
    return states if torch.distributed.get_rank() == 0 else []


BOTH = [
    Case("muon", BF16),
    pytest.param(Case("adaptive_muon", BF16, config=NORMUON), marks=pytest.mark.long),
    pytest.param(Case("soap", UNFUSED, config=WHOLE), marks=pytest.mark.long),
]


@pytest.mark.parametrize("case", BOTH, ids=lambda case: case.optimizer)
@pytest.mark.parametrize("from_plain", [True, False], ids=["plain first", "layer-wise first"])
def test_storages_load_each_other(tmp_path, case, from_plain):
    tp = {"tp": 2}
    writes, reads = (plain(case), case) if from_plain else (case, plain(case))
    layouts = [reads, replace(reads, parallel=tp)]
    # the plain storage's SOAP keeps factors of each tensor-parallel slab
    if case.optimizer == "soap" and not from_plain:
        layouts = [reads]
    if case.optimizer != "soap" or not from_plain:
        writes = replace(writes, parallel=tp)
    saved = alike(run_ranks(2, save_one, writes, str(tmp_path), timeout=200)[0])
    for found in run_ranks(2, load_at, layouts, str(tmp_path), timeout=200)[0]:
        assert not differences(saved, alike(found))
        assert len(found) > 40
