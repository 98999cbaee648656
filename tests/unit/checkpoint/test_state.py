"""Programs without the trainer: save, and load at other layouts and into other optimizers."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from torch import nn

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.checkpoint.keys import tensors
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.routing.groups import GROUP_ID
from megatron_eopt.state.groups import continue_groups, steps_of
from megatron_eopt.testing.scene import forget_megatron
from tests.functional.saved_states import by_kind, differing, tensors_in
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.log import listening
from tests.harness.models import assert_same, copies_of
from tests.unit.storage import full_state
from tests.unit.storage.full_state import Case, build, resume, save_one, steps, unwrapped, write
from tests.unit.storage.runs import DENSE, MOE, NORMUON, OVERLAP, PLAIN, REPLICATED

BF16 = {**DENSE, "query_groups": 4, "dtype": torch.bfloat16}
FORM = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save_again(case: Case, folder: str, other: str) -> None:
    write(case, *resume(case, folder), other)


@pytest.mark.parametrize(
    "case",
    [Case("muon", BF16, {"tp": 2}), Case("muon", MOE, {"ep": 2})],
    ids=["TP 2 -> 1", "EP 2 -> 1"],
)
def test_what_is_saved_again_at_another_layout_is_the_same(tmp_path, case):
    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(2, save_one, case, str(first))
    run_ranks(1, save_again, replace(case, parallel={}), str(first), str(second))
    assert len(tensors_in(first)) > 20
    assert not differing(first, second)


@on_ranks(2)
def test_all_ranks_compute_with_the_parameters_of_the_checkpoint(tmp_path):
    """Compare every replica, after the gather that overlaps with the first forward pass, too."""
    case = Case("muon", BF16, ddp=OVERLAP)
    save_one(case, tmp_path)
    forget_megatron()
    chunk, _ = resume(case, tmp_path)
    saved, compared = tensors_in(tmp_path), 0
    for gathered in (False, True):
        if gathered:
            chunk.start_param_sync(force_sync=True)
        for item in tensors(unwrapped(chunk).sharded_state_dict()):
            compared += 1
            expected = saved[item.key][item.global_slice()]
            same = torch.equal(item.data.reshape(-1), expected.reshape(-1))
            assert same, (item.key, gathered)
    assert compared > 20


def outcome_of(case: Case, folder: Path) -> tuple[str, str, float]:
    """Load; return the error, what was logged, and the largest momentum."""
    with listening() as lines:
        try:
            _, optimizer = resume(case, folder)
        except ValueError as error:
            return f"{type(error).__name__}: {error}", "", 0.0
    states = [s for child in optimizer.chained_optimizers for s in child.optimizer.state.values()]
    momenta = [s["momentum_buffer"].abs().max() for s in states if "momentum_buffer" in s]
    return "", "\n".join(lines), float(max(momenta, default=torch.tensor(0.0)))


def outcome(world: int, case: Case, folder: Path) -> tuple[str, str, float]:
    """Return the error of loading, the same on all ranks, and rank 0's log and momentum."""
    results = run_ranks(world, outcome_of, case, folder)
    assert len({error for error, _, _ in results}) == 1
    return results[0]


def test_state_without_a_step_is_loaded(tmp_path):
    # the first steps may all be skipped, until the loss scale fits
    run_ranks(2, save_one, Case("adam", BF16), str(tmp_path), 0)
    assert outcome(2, Case("adam", BF16), tmp_path)[:2] == ("", "")


def test_another_model_is_named(tmp_path):
    run_ranks(2, save_one, Case("muon", DENSE), str(tmp_path))
    error, *_ = outcome(2, Case("muon", DENSE | {"query_groups": 4}), tmp_path)
    assert "has shape" in error
    assert "Load a checkpoint of this model" in error


def moments(state: dict[str, Any], kind: str) -> dict[str, torch.Tensor]:
    """Return the state of one kind by names of parameters."""
    return {name: value for (its, name), value in by_kind(state).items() if its == kind}


@pytest.mark.parametrize(
    ("storage", "form"),
    [
        ({}, "dp_reshardable"),
        ({}, "fully_reshardable"),
        pytest.param(REPLICATED, "fully_reshardable", marks=pytest.mark.long),
    ],
    ids=["sharded, by bucket", "sharded", "plain"],
)
def test_a_checkpoint_of_megatron_cores_adam_loads_into_muon(tmp_path, storage, form):
    muon = Case("muon", BF16, **storage)
    adam = replace(muon, optimizer="adam", stock=True, form=form)
    saved = run_ranks(2, save_one, adam, str(tmp_path))[0]
    error, log, momentum = outcome(2, muon, tmp_path)
    assert (error, momentum) == ("", 0.0)
    assert "starts fresh for muon: the checkpoint's is of adam" in log
    # what remains Adam's goes on
    found = run_ranks(2, resumed, muon, str(tmp_path))[0]
    for kind in ("exp_avg", "exp_avg_sq"):
        kept = moments(found, kind)
        assert any("output_layer" in name for name in kept)
        for name, value in kept.items():
            assert torch.equal(value, moments(saved, kind)[name]), name


def save_by_place(case: Case, folder: str) -> dict[str, Any]:
    """Train and save as megatron-core names state by default; return the optimizer's tensors."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    model = unwrapped(chunk).sharded_state_dict()
    state = optimizer.sharded_state_dict(unwrapped(chunk).sharded_state_dict(), metadata={})
    assert any(item.key.startswith("chained_1.") for item in tensors(state))
    dist_checkpointing.save({"model": model, "optimizer": state}, folder)
    return tensors_in(Path(folder))


def resumed(case: Case, folder: str | Path) -> dict[str, Any]:
    return full_state.full_state(case, *resume(case, folder))


def test_places_in_a_chain_of_megatrons_do_not_matter(tmp_path):
    # megatron-core's Muon also updates learned position embeddings
    ours = Case("muon", {**BF16, "position_embedding": "rope"})
    stock = replace(ours, **REPLICATED, stock=True)
    saved = run_ranks(2, save_by_place, stock, str(tmp_path))[0]
    found = run_ranks(2, resumed, ours, str(tmp_path))[0]
    for kind in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        assert_same(moments(found, kind), moments(saved, kind))
    # no argument of the trainer tells Adam who wrote the momentum
    error, _, _ = outcome(2, replace(ours, optimizer="adam"), tmp_path)
    assert "settings ['momentum']" in error
    assert "was written by an optimizer that the checkpoint does not tell" in error


NAMO = {"adaptive_muon_moment2_method": "namo"}
WHOLE = {"muon_split_qkv": False, "muon_split_gated": False}


@pytest.mark.parametrize(
    ("optimizer", "shared", "before", "after"),
    [
        # a state whose shape says nothing: it is one number
        ("adaptive_muon", NAMO, {}, {"muon_split_per_head": True}),
        ("adaptive_muon", NAMO, WHOLE, {}),
        # the right factors of a fused weight and of its first part have the same shape
        ("soap", {}, {}, WHOLE),
    ],
)
def test_a_matrix_gets_no_state_of_another_one(tmp_path, optimizer, shared, before, after):
    run_ranks(2, save_one, Case(optimizer, DENSE, config=shared | before), str(tmp_path))
    error, _, _ = outcome(2, Case(optimizer, DENSE, config=shared | after), tmp_path)
    assert "linear_" in error
    assert "is of other matrices" in error
    assert "must have all state of the same optimizer" in error


def weights_of_a_load(case: Case, folder: str) -> dict[str, torch.Tensor]:
    return copies_of(resume(case, folder)[0])


def test_float32_models_and_frozen_parameters_get_their_part_of_16_bits(tmp_path):
    case = Case("muon", BF16)
    run_ranks(2, save_one, case, str(tmp_path))
    in_float32 = replace(case, model={**BF16, "dtype": torch.float32})
    first, second = run_ranks(2, weights_of_a_load, in_float32, str(tmp_path))
    assert any(weight.any() for weight in first.values())
    assert_same(second, first)
    error, log, _ = outcome(2, replace(case, frozen="linear_fc1"), tmp_path)
    assert not error
    assert "linear_fc1.weight: is left out" in log


@pytest.mark.parametrize("is_loading", [False, True])
@on_ranks(1)
def test_no_sharded_tensor_is_made_but_those_that_are_asked_for(is_loading):
    chunk, optimizer = build(Case("muon", {**BF16, "gated": False}))
    model = unwrapped(chunk).sharded_state_dict()
    how = {"autospec": True, "side_effect": ShardedTensor.__post_init__}
    with mock.patch.object(ShardedTensor, "__post_init__", **how) as made:
        state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=FORM)
    assert made.call_count == len(list(tensors(state))) > 20


@on_ranks(2)
def test_the_model_gets_the_main_weights_when_asked():
    for dtype in (torch.bfloat16, torch.float32):
        late = {"overlap_param_gather": True}
        for ddp, config in (({}, {}), (OVERLAP, late), (PLAIN, {}), (PLAIN, PLAIN)):
            case = Case("muon", {**DENSE, "layers": 1, "dtype": dtype}, ddp=ddp, config=config)
            for child in (False, True):
                chunk, optimizer = build(case)
                steps(case, chunk, optimizer, 0, 1)
                if ddp is OVERLAP:  # what a forward pass may do later
                    chunk.start_param_sync(force_sync=True)
                before = [param.detach().clone() for param in chunk.parameters()]
                for param in chunk.parameters() if dtype == torch.bfloat16 else ():
                    param.data.zero_()
                for part in optimizer.chained_optimizers if child else [optimizer]:
                    part.quantize_and_sync_model_params_from_main_params()
                assert all(map(torch.equal, chunk.parameters(), before)), (case, child)


@pytest.mark.parametrize("case", [Case("muon", BF16), Case("muon", MOE, {"ep": 2})])
@on_ranks(2)
def test_a_load_gathers_once_for_all_optimizers(tmp_path, case):
    save_one(case, tmp_path)
    forget_megatron()
    how = {"autospec": True, "side_effect": DistributedDataParallel.start_param_sync}
    with mock.patch.object(DistributedDataParallel, "start_param_sync", **how) as calls:
        resume(case, tmp_path)
    assert calls.call_count == 1


def test_how_torch_computes_is_not_a_matter_of_checkpoints():
    """A checkpoint of megatron-core's Adam says ``fused=None``: counts would move to the host."""
    ours = {GROUP_ID: "adam", "fused": True, "capturable": False, "eps": 1e-8}
    continue_groups([ours], [{GROUP_ID: "adam", "fused": None, "capturable": True, "eps": 1e-6}])
    assert ours == {GROUP_ID: "adam", "fused": True, "capturable": False, "eps": 1e-6}


@pytest.mark.parametrize(
    ("groups", "steps"),
    [
        # of several groups, the largest count
        (["muon/dense/a", "muon/dense/b"], 5),
        (["muon/dense/b"], 3),
        # a group that continues none counts as others of its optimizer
        (["adam/dense/new"], 7),
        (["sgd/dense/new"], 9),
    ],
)
def test_groups_go_on_with_the_steps_of_those_that_they_continue(groups, steps):
    saved = [
        {GROUP_ID: "muon/dense/a", "params": [], "step": 5},
        {GROUP_ID: "muon/dense/b", "params": [], "step": 3},
        {"optimizer": "adam", "params": [], "wd_mult": 0.0, "step": 7},
    ]
    own = [{GROUP_ID: name, "params": [], "wd_mult": 1.0} for name in groups]
    assert steps_of(own, saved, 9) == steps


# from before state named its parameters: tests/data/before_names, Muon, two steps

DATA = Path(__file__).parents[2] / "data/before_names"
MODEL = {"layers": 1, "hidden": 16, "heads": 2, "query_groups": 1, "gated": True}
MODEL |= {"vocabulary": 32, "dtype": torch.bfloat16}


@pytest.mark.parametrize(("ranks", "storage"), [(1, {}), (2, {}), (1, REPLICATED)])
def test_old_checkpoints_of_megatrons_loop(ranks, storage):
    found = run_ranks(ranks, resumed, Case("muon", MODEL, **storage), DATA / "sharded")[0]
    saved = {key: value for key, value in tensors_in(DATA / "sharded").items() if "state." in key}
    assert len(saved) > 20
    for key, value in saved.items():
        key = key.replace(".param.", ".fp32_param.") if storage else key
        assert torch.equal(found[key].view(-1), value.view(-1)), key


@on_ranks(1)
def test_old_checkpoints_of_megatrons_loop_in_torchs_format():
    chunk, optimizer = build(Case("muon", MODEL, **REPLICATED))
    saved = torch.load(DATA / "replicated.pt", weights_only=True)
    for param, value in zip(chunk.parameters(), saved["model"], strict=True):
        param.data.copy_(value)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    for one, other in zip(optimizer.state_dict(), saved["optimizer"], strict=True):
        for number, values in other["optimizer"]["state"].items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(one["optimizer"]["state"][number][key]), value)


def test_old_checkpoints_of_an_own_loop():
    model = nn.Sequential(nn.Embedding(8, 6), nn.Linear(6, 5))
    optimizer = build_optimizer(model, EmergingOptimizerConfig(optimizer="muon", lr=0.01))
    saved = torch.load(DATA / "own_loop.pt", weights_only=True)
    assert "param_names" not in saved
    optimizer.load_state_dict(saved)
    for number, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            assert torch.equal(value, saved["state"][number][key])


@on_ranks(1)
def test_without_tensor_parallelism_a_slab_is_the_whole_weight():
    names = []
    for mode in ("blockwise", "duplicated"):
        case = Case("adaptive_muon", DENSE, config={**NORMUON, "muon_tp_mode": mode})
        names.append({*full_state.full_state(case, *build(case))})
        forget_megatron()
    assert names[0] == names[1]
