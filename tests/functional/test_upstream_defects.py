"""Checkpoints: what megatron-core's optimizers get wrong, and that ours do not.

| defect | test |
|---|---|
| torch_dist asserts that state has its parameter's shape: no SOAP, no NorMuon | tests/unit/storage/test_resharding.py::test_dense, tests/unit/build/test_plain_checkpoint.py::test_every_optimizer_continues, ::test_other_layouts_load_it |
| layer-wise checkpoints load at one data-parallel size only | tests/unit/storage/test_resharding.py::test_dense, ::test_experts |
| format torch: files of context-parallel ranks overwrite each other | tests/functional/test_files_of_ranks.py::test_ranks_that_are_given_one_file_name_keep_their_own_files, tests/functional/test_files_of_ranks.py::test_files_of_ranks_resume_a_run |
| format torch, distributed Adam or SGD over torch's own: KeyError, or a leaf is written to, after loading; a run of format torch_dist loads no layer-wise state from it, without a word | tests/functional/test_files_of_ranks.py::test_files_of_ranks_resume_a_run |
| format torch with --auto-detect-ckpt-format: KeyError for a torch_dist checkpoint | tests/functional/test_files_of_ranks.py::test_a_run_that_writes_files_of_ranks_resumes_from_a_distributed_checkpoint |
| a group's identity contains the learning rate | test_another_schedule_resumes, tests/unit/build/test_resume.py |
| muon with the distributed optimizer goes on from other weights | test_the_first_loss_after_a_resume_is_that_of_the_saved_weights, tests/unit/checkpoint/test_state.py::test_all_ranks_compute_with_the_parameters_of_the_checkpoint |
| fully_reshardable saves shifted tensors where a bucket is padded; empty buckets are refused | tests/unit/storage/test_resharding.py::test_padded_buckets |
| distributed Adam over torch's AdamW: KeyError, or a step of 0, after loading | tests/unit/storage/test_resharding.py::test_resuming_equals_not_stopping |
"""  # noqa: E501

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig

from megatron_eopt import checkpoints
from tests.harness import run_ranks
from tests.harness.models import forward_backward, synthetic_batch
from tests.harness.scene import forget_megatron
from tests.unit.storage.full_state import (
    Case,
    build,
    differences,
    full_state,
    sharded,
    steps,
    unwrapped,
)
from tests.unit.storage.runs import DENSE, make_chunk, set_lr

# without learned position embeddings, which megatron-core's Muon orthogonalizes
BF16 = {**DENSE, "query_groups": 4, "position_embedding": "rope", "dtype": torch.bfloat16}
# as many matrices as parameters, which both storages then know alike
UNFUSED = {**BF16, "gated": False}
WHOLE = {"muon_split_qkv": False, "muon_split_gated": False}
REPLICATED = {"use_distributed_optimizer": False}
FORMS = ("fully_reshardable", "dp_reshardable")
ONE_FORM = [FORMS[0], pytest.param(FORMS[1], marks=pytest.mark.long)]


def plain(case: Case) -> Case:
    """Return the same run with whole parameters on every data-parallel rank."""
    return replace(case, ddp=REPLICATED, config={**case.config, **REPLICATED})


# The same optimizer resumes


def scheduled(case: Case, folder: str) -> tuple[list[float], list[float], list[str]]:
    """Resume with another schedule; return both sides' settings, and what of the state differs."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    dist_checkpointing.save(sharded(case, chunk, optimizer, is_loading=False), folder)
    saved = full_state(case, chunk, optimizer)
    forget_megatron()
    other = {"lr": 0.02, "min_lr": 0.005, "weight_decay": 0.3, "decoupled_lr": 0.04}
    case = replace(case, config={**case.config, **other})
    chunk, optimizer = resume(case, folder)
    found = [(g["max_lr"], g["min_lr"]) for g in optimizer.param_groups]
    _, new = build(case)
    expected = [(g["max_lr"], g["min_lr"]) for g in new.param_groups]
    return found, expected, differences(saved, full_state(case, chunk, optimizer))


def resume(case: Case, folder: str, **options: Any) -> tuple[Any, Any]:
    """Load into a model of zeros."""
    chunk, optimizer = build(case)
    for param in chunk.parameters():
        param.data.zero_()
    loaded = checkpoints.load(sharded(case, chunk, optimizer, is_loading=True), folder, **options)
    unwrapped(chunk).load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    set_lr(optimizer, optimizer.config)
    return chunk, optimizer


@pytest.mark.parametrize("storage", ["plain", "layer-wise"])
def test_another_schedule_resumes(tmp_path, storage):
    # groups of a learning rate of their own, which megatron-core finds by its number
    case = Case("muon", BF16, config={"decoupled_lr": 0.03})
    case = plain(case) if storage == "plain" else case
    for found, expected, different in run_ranks(2, scheduled, case, str(tmp_path)):
        assert found == expected
        assert {lr for lr, _ in found} == {0.02, 0.04}
        assert not different


def first_losses(case: Case, folder: str, overlap: bool) -> tuple[float | None, float | None]:
    """Return the loss of the saved weights, and of those that a resumed run computes with."""
    chunk, optimizer = build(case)
    batches = [synthetic_batch(torch.distributed.get_rank())]
    for _ in range(2):
        optimizer.zero_grad()
        forward_backward([chunk], batches)
        optimizer.step()
    if overlap:
        # as the trainer does, so that the weights are there before the next forward pass
        chunk.disable_forward_pre_hook()
    dist_checkpointing.save(sharded(case, chunk, optimizer, is_loading=False), folder)
    before = forward_backward([chunk], batches)
    forget_megatron()
    chunk, _ = resume(case, folder)
    return before, forward_backward([chunk], batches)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_first_loss_after_a_resume_is_that_of_the_saved_weights(tmp_path, overlap):
    flags = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    case = Case("muon", BF16, ddp=flags, config={"overlap_param_gather": overlap})
    for before, after in run_ranks(2, first_losses, case, str(tmp_path), overlap):
        assert before == after
        assert before != pytest.approx(math.log(32), abs=1e-3)


# Another storage, another program, another optimizer


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


def save_at(case: Case, folder: str) -> dict[str, Any]:
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    dist_checkpointing.save(sharded(case, chunk, optimizer, is_loading=False), folder)
    state = full_state(case, chunk, optimizer)
    return state if torch.distributed.get_rank() == 0 else {}


def load_at(cases: list[Case], folder: str) -> list[dict[str, Any]]:
    """Load at several layouts; each must be able to go on."""
    states = []
    for case in cases:
        chunk, optimizer = resume(case, folder)
        states.append(full_state(case, chunk, optimizer))
        steps(case, chunk, optimizer, 2, 3)
        forget_megatron()
    return states if torch.distributed.get_rank() == 0 else []


NORMUON = {"adaptive_muon_moment2_method": "normuon"}
BOTH = [
    Case("muon", BF16),
    pytest.param(Case("adaptive_muon", BF16, config=NORMUON), marks=pytest.mark.long),
    pytest.param(Case("soap", UNFUSED, config=WHOLE), marks=pytest.mark.long),
]


@pytest.mark.parametrize("case", BOTH, ids=lambda case: case.optimizer)
@pytest.mark.parametrize("from_plain", [True, False], ids=["plain first", "layer-wise first"])
def test_storages_load_each_other(tmp_path, case, from_plain):
    tp = {"tp": 2}
    writes = case if not from_plain else plain(case)
    # the plain storage's SOAP keeps factors of each tensor-parallel slab
    if case.optimizer != "soap" or not from_plain:
        writes = replace(writes, parallel=tp)
    reads = plain(case) if not from_plain else case
    layouts = [reads, replace(reads, parallel=tp)]
    if case.optimizer == "soap" and not from_plain:
        layouts = [reads]
    saved = alike(run_ranks(2, save_at, writes, str(tmp_path), timeout=200)[0])
    for found in run_ranks(2, load_at, layouts, str(tmp_path), timeout=200)[0]:
        assert not differences(saved, alike(found))
        assert len(found) > 40


def stocks(name: str, form: str | None, folder: str) -> dict[str, Any]:
    """Step megatron-core's own optimizer and save; return its momenta and weights by key."""
    distributed = form is not None
    flags = {"use_distributed_optimizer": distributed}
    case = Case(name, BF16, ddp=flags, form=form or FORMS[0])
    chunk = make_chunk(case.run)
    config = OptimizerConfig(
        optimizer=name,
        lr=0.01,
        min_lr=0.001,
        bf16=True,
        clip_grad=0.0,
        muon_tp_mode="duplicated",
        **flags,
    )
    optimizer = megatron_optimizer.get_megatron_optimizer(
        config, [chunk], use_gloo_process_groups=False
    )
    set_lr(optimizer, config)
    steps(case, chunk, optimizer, 0, 2)
    dist_checkpointing.save(sharded(case, chunk, optimizer, is_loading=False), folder)
    if form == "dp_reshardable":
        # by bucket nothing can be compared by name; the same state in the other form can be
        case = replace(case, form=FORMS[0])
    state = full_state(case, chunk, optimizer)
    return state if torch.distributed.get_rank() == 0 else {}


def ours_from(case: Case, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    chunk, optimizer = resume(case, folder, **options)
    state = full_state(case, chunk, optimizer)
    steps(case, chunk, optimizer, 2, 3)
    return state if torch.distributed.get_rank() == 0 else {}


def of_kind(state: dict[str, Any], kind: str) -> dict[str, torch.Tensor]:
    prefix = f"optimizer.state.{kind}."
    return {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}


def check_changed(saved: dict[str, Any], found: dict[str, Any], source: str | None) -> None:
    """Check state of a run whose matrices have changed their optimizer.

    Args:
        saved: Before.
        found: After.
        source: Kind of state that Muon's momentum comes from; None if it is fresh.
    """
    saved, found = alike(saved), alike(found)
    momenta = of_kind(found, "momentum_buffer")
    assert momenta
    for name, value in momenta.items():
        expected = torch.zeros_like(value) if source is None else of_kind(saved, source)[name]
        assert torch.equal(value, expected), name
        assert source is None or value.any()
    for kind in ("exp_avg", "exp_avg_sq"):
        before, after = of_kind(saved, kind), of_kind(found, kind)
        assert after
        assert not after.keys() & momenta.keys()
        for name, value in after.items():
            assert torch.equal(value, before[name]), f"{kind} of {name}"
    weights = of_kind(found, "param")
    assert len(weights) > len(momenta)
    for name, value in weights.items():
        assert torch.equal(value, of_kind(saved, "param")[name]), name


def test_stocks_plain_muon_loads_layer_wise(tmp_path):
    saved = run_ranks(2, stocks, "muon", None, str(tmp_path))[0]
    found = run_ranks(2, ours_from, Case("muon", BF16), str(tmp_path), {})[0]
    check_changed(saved, found, "momentum_buffer")


@pytest.mark.parametrize("form", ONE_FORM)
def test_distributed_adam_loads_into_layer_wise_muon(tmp_path, form):
    folder = str(tmp_path)
    saved = run_ranks(2, stocks, "adam", form, folder)[0]
    muon = Case("muon", BF16)
    check_changed(saved, run_ranks(2, ours_from, muon, folder, {})[0], None)
    options = {"momentum_from_adam": True}
    check_changed(saved, run_ranks(2, ours_from, muon, folder, options)[0], "exp_avg")
