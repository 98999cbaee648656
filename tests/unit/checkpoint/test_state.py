"""Programs without the trainer: save, and load at other layouts and into other optimizers."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.keys import split_key, tensors
from megatron_eopt.checkpoint.saved_groups import adopt
from megatron_eopt.routing.groups import GROUP_ID
from megatron_eopt.testing.scene import forget_megatron
from tests.functional.saved_states import differing, tensors_in
from tests.harness import run_ranks
from tests.harness.log import listening
from tests.unit.storage.full_state import (
    Case,
    build,
    counts_of,
    full_state,
    resume,
    save_one,
    steps,
    unwrapped,
    write,
)
from tests.unit.storage.runs import DENSE, MOE, OVERLAP, PLAIN, REPLICATED

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


def differing_params(case: Case, folder: str) -> tuple[int, list[str]]:
    """Return how many of the model's tensors were compared with the checkpoint's, and which differ.

    Every replica is compared, after the gather that overlaps with the first forward pass, too.
    """
    chunk, _ = resume(case, folder)
    saved = tensors_in(Path(folder))
    differing, compared = [], 0
    for gathered in (False, True):
        if gathered:
            chunk.start_param_sync(force_sync=True)
        for item in tensors(unwrapped(chunk).sharded_state_dict()):
            compared += 1
            expected = saved[item.key][item.global_slice()]
            if not torch.equal(item.data.reshape(-1), expected.reshape(-1)):
                differing.append(f"{item.key} {gathered}")
    return compared, differing


def test_all_ranks_compute_with_the_parameters_of_the_checkpoint(tmp_path):
    case = Case("muon", BF16, ddp=OVERLAP)
    run_ranks(2, save_one, case, str(tmp_path))
    for compared, other in run_ranks(2, differing_params, case, str(tmp_path)):
        assert compared > 20
        assert not other


def outcome_of(case: Case, folder: str, options: dict[str, Any]) -> tuple[str, str, float]:
    """Load; return the error, what was logged, and the largest momentum."""
    with listening() as lines:
        try:
            _, optimizer = resume(case, folder, **options)
        except ValueError as error:
            return f"{type(error).__name__}: {error}", "", 0.0
    states = [s for child in optimizer.chained_optimizers for s in child.optimizer.state.values()]
    momenta = [s["momentum_buffer"].abs().max() for s in states if "momentum_buffer" in s]
    return "", "\n".join(lines), float(max(momenta, default=torch.tensor(0.0)))


def outcome(world: int, case: Case, folder: Path, **options: Any) -> tuple[str, str, float]:
    """Return the error of loading, the same on all ranks, and rank 0's log and momentum."""
    results = run_ranks(world, outcome_of, case, str(folder), options)
    assert len({error for error, _, _ in results}) == 1
    return results[0]


def test_buckets_without_a_step_are_loaded(tmp_path):
    # the first steps may all be skipped, until the loss scale fits
    case = Case("adam", BF16, form="dp_reshardable")
    run_ranks(2, save_one, case, str(tmp_path), 0)
    assert outcome(2, case, tmp_path)[:2] == ("", "")


def moments(state: dict[str, Any], kind: str) -> dict[str, torch.Tensor]:
    """Return the state of one kind by names of parameters."""
    split = {key: split_key(key) for key in state}
    return {parts.name: state[key] for key, parts in split.items() if parts and parts.kind == kind}


@pytest.mark.parametrize(
    ("storage", "stock"),
    [
        ({}, True),
        (REPLICATED, False),
        pytest.param({}, False, marks=pytest.mark.long),
        pytest.param(REPLICATED, True, marks=pytest.mark.long),
    ],
    ids=["sharded of megatron-core", "plain", "sharded", "plain of megatron-core"],
)
def test_a_checkpoint_of_adam_loads_into_muon_and_back(tmp_path, storage, stock):
    muon = Case("muon", BF16, **storage)
    adam = replace(muon, optimizer="adam", stock=stock)
    saved = run_ranks(2, save_one, adam, str(tmp_path))[0]
    error, log, momentum = outcome(2, muon, tmp_path)
    assert (error, momentum) == ("", 0.0)
    assert "momentum_buffer starts fresh (the checkpoint has: exp_avg, exp_avg_sq)" in log
    says_so = replace(muon, config={**muon.config, "checkpoint_momentum_from_adam": True})
    for case, options in ((muon, {"momentum_from_adam": True}), (says_so, {})):
        found = run_ranks(2, resumed, case, str(tmp_path), options)[0]
        momenta = moments(found, "momentum_buffer")
        assert len(momenta) > 3
        for name, value in momenta.items():
            assert torch.equal(value, moments(saved, "exp_avg")[name]), name
        # what remains Adam's goes on
        kept = moments(found, "exp_avg_sq")
        assert any("output_layer" in name for name in kept)
        for name, value in kept.items():
            assert torch.equal(value, moments(saved, "exp_avg_sq")[name]), name
    back = tmp_path / "muon"
    run_ranks(2, save_one, muon, str(back))
    error, log, _ = outcome(2, replace(adam, stock=False), back)
    assert error == ""
    assert "exp_avg starts fresh (the checkpoint has: momentum_buffer)" in log


def test_buckets_of_adam_are_left_to_muon(tmp_path):
    adam = Case("adam", MOE, {"ep": 2}, form="dp_reshardable")
    run_ranks(2, save_one, adam, str(tmp_path))
    for case in (replace(adam, optimizer="muon"), replace(adam, optimizer="lion")):
        assert outcome(2, case, tmp_path, momentum_from_adam=True)[0] == ""
    # where buckets of the same names are no state of these parameters
    other = replace(adam, optimizer="muon", parallel={})
    assert outcome(2, other, tmp_path, momentum_from_adam=True)[0] == ""
    stocks = tmp_path / "stock"
    run_ranks(2, save_one, replace(adam, stock=True), str(stocks))
    error, _, _ = outcome(2, other, stocks)
    # the cause comes first, before any list of parameters
    assert error.partition("checkpoint=")[2].startswith("'dp_reshardable': this form of Adam's")


def save_by_place(case: Case, folder: str) -> dict[str, Any]:
    """Train and save as megatron-core names state by default; return the optimizer's tensors."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    model = unwrapped(chunk).sharded_state_dict()
    state = optimizer.sharded_state_dict(unwrapped(chunk).sharded_state_dict(), metadata={})
    assert any(item.key.startswith("chained_1.") for item in tensors(state))
    dist_checkpointing.save({"model": model, "optimizer": state}, folder)
    return tensors_in(Path(folder))


def resumed(case: Case, folder: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    return full_state(case, *resume(case, folder, **(options or {})))


@pytest.mark.parametrize("after", [Case("muon", BF16), Case("adam", BF16, **REPLICATED)])
def test_places_in_a_chain_of_megatrons_do_not_matter(tmp_path, after):
    before = Case("muon", BF16, **REPLICATED, stock=True)
    saved = run_ranks(2, save_by_place, before, str(tmp_path))[0]
    found = run_ranks(2, resumed, after, str(tmp_path))[0]
    kinds = ("momentum_buffer",) if after.optimizer == "muon" else ()
    for kind in ("exp_avg", "exp_avg_sq", *kinds):
        taken = [name for name in moments(saved, kind) if name in moments(found, kind)]
        assert taken
        for name in taken:
            assert torch.equal(moments(saved, kind)[name], moments(found, kind)[name]), name


NAMO = {"adaptive_muon_moment2_method": "namo"}
HEADS = {"muon_split_per_head": True}
WHOLE = {"muon_split_qkv": False, "muon_split_gated": False}


@pytest.mark.parametrize(("before", "after"), [({}, HEADS), (WHOLE, {})])
def test_a_matrix_gets_no_state_of_another_one(tmp_path, before, after):
    # whose shape says nothing: it is one number
    run_ranks(1, save_one, Case("adaptive_muon", DENSE, config=NAMO | before), str(tmp_path))
    case = Case("adaptive_muon", DENSE, config=NAMO | after)
    error, _, _ = outcome(1, case, tmp_path)
    assert "linear_qkv" in error
    assert "--ckpt-allow-missing-optim-state moment2_buffer" in error
    error, _, momentum = outcome(1, case, tmp_path, fresh=["moment2_buffer"])
    assert error == ""
    assert momentum > 0


def alike(case: Case, folder: str) -> None:
    """Compare this rank's weights after loading with the other's."""
    chunk, _ = resume(case, folder)
    mine = torch.cat([param.detach().view(-1) for param in chunk.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(both, mine)
    assert torch.equal(*both)
    assert mine.any()


def test_main_weights_of_16_bits_are_those_of_all_ranks_in_float32(tmp_path):
    run_ranks(2, save_one, Case("muon", BF16), str(tmp_path))
    run_ranks(2, alike, Case("muon", {**BF16, "dtype": torch.float32}), str(tmp_path))


def test_state_of_parameters_that_are_frozen_now_is_left_out(tmp_path):
    run_ranks(2, save_one, Case("muon", BF16), str(tmp_path))
    assert outcome(2, replace(Case("muon", BF16), frozen="linear_fc1"), tmp_path)[0] == ""


def other_matrices(writes: Case, reads: Case, folder: str) -> str:
    """Load where fused weights are split otherwise; return what is to start fresh, and do so."""
    save_one(writes, folder)
    forget_megatron()
    with pytest.raises(ConfigurationError) as error:
        resume(reads, folder)
    named = re.search(r"--ckpt-allow-missing-optim-state (.*) \(", str(error.value))
    assert named is not None
    forget_megatron()
    chunk, optimizer = resume(reads, folder, fresh=named[1].split())
    steps(reads, chunk, optimizer, 2, 3)
    return named[1]


def test_no_state_is_taken_from_another_matrix_of_the_same_name(tmp_path):
    # the right factors of a fused weight and of its first part have the same shape, and averages,
    # which are there for every element, are in the basis of one matrix
    cases = (Case("soap", DENSE, config=config) for config in ({}, WHOLE))
    for named in run_ranks(2, other_matrices, *cases, str(tmp_path)):
        assert named == "L Q_L Q_R R exp_avg exp_avg_sq"


def _made(is_loading: bool) -> tuple[int, int]:
    """Return how many sharded tensors are asked for, and how many are made for that."""
    case = Case("muon", {**BF16, "gated": False})
    chunk, optimizer = build(case)
    model = unwrapped(chunk).sharded_state_dict()
    check = ShardedTensor.__post_init__
    with mock.patch.object(
        ShardedTensor, "__post_init__", autospec=True, side_effect=check
    ) as made:
        state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=FORM)
    return len(list(tensors(state))), made.call_count


@pytest.mark.parametrize("is_loading", [False, True])
def test_no_sharded_tensor_is_made_but_those_that_are_asked_for(is_loading):
    asked_for, made = run_ranks(1, _made, is_loading)[0]
    assert made == asked_for > 20


def _synced() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for ddp, config in (({}, {}), (PLAIN, {}), (PLAIN, PLAIN)):
            case = Case("muon", {**DENSE, "layers": 1, "dtype": dtype}, ddp=ddp, config=config)
            for child in (False, True):
                chunk, optimizer = build(case)
                steps(case, chunk, optimizer, 0, 1)
                before = [param.detach().clone() for param in chunk.parameters()]
                for param in chunk.parameters() if dtype == torch.bfloat16 else ():
                    param.data.zero_()
                for part in optimizer.chained_optimizers if child else [optimizer]:
                    part.quantize_and_sync_model_params_from_main_params()
                assert all(map(torch.equal, chunk.parameters(), before)), (case, child)


def gathers_of_a_load(case: Case, folder: str) -> int:
    """Return how often a load gathers the model's buckets."""
    save_one(case, folder)
    forget_megatron()
    gather = DistributedDataParallel.start_param_sync
    with mock.patch.object(
        DistributedDataParallel, "start_param_sync", autospec=True, side_effect=gather
    ) as calls:
        resume(case, folder)
    return int(calls.call_count)


@pytest.mark.parametrize("case", [Case("muon", BF16), Case("muon", MOE, {"ep": 2})])
def test_a_load_gathers_once_for_all_optimizers(tmp_path, case):
    assert run_ranks(2, gathers_of_a_load, case, str(tmp_path)) == [1, 1]


def test_the_model_gets_the_main_weights_when_asked():
    run_ranks(2, _synced)


def test_how_torch_computes_is_not_a_matter_of_checkpoints():
    """A checkpoint of megatron-core's Adam says ``fused=None``: counts would move to the host."""
    ours = {GROUP_ID: "adam", "fused": True, "capturable": False, "eps": 1e-8}
    adopt(ours, [{GROUP_ID: "adam", "fused": None, "capturable": True, "eps": 1e-6}])
    assert ours == {GROUP_ID: "adam", "fused": True, "capturable": False, "eps": 1e-6}


def without_a_value(case: Case, folder: str) -> str:
    """Load what lacks one requested value, as after a load that skips missing keys."""

    def read(state: Any, folder: str) -> Any:
        loaded = dist_checkpointing.load(state, folder)
        values = loaded["optimizer"]["param_state"]["values"]
        values.pop(max(values, key=int))
        return loaded

    with pytest.raises(ConfigurationError) as error:
        resume(case, folder, read)
    return str(error.value)


@pytest.mark.parametrize("ddp", [PLAIN, {}], ids=["plain", "sharded"])
def test_state_that_was_asked_for_and_not_loaded_is_named(tmp_path, ddp):
    case = Case("muon", DENSE, ddp=ddp)
    run_ranks(1, save_one, case, str(tmp_path))
    (said,) = run_ranks(1, without_a_value, case, str(tmp_path))
    assert "must hold this state of the optimizer, but does not" in said


def counts_with_maxima(case: Case, folder: str) -> set[int]:
    def keep_maxima(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["amsgrad"] = True

    chunk, optimizer = resume(case, folder, adjust=keep_maxima)
    assert {"max_exp_avg_sq"} <= {key for m in optimizer.chained_optimizers for key in kinds_of(m)}
    return set(counts_of(chunk, optimizer).values())


def kinds_of(member: Any) -> set[str]:
    return {key for state in member.optimizer.state.values() for key in state}


def test_a_maximum_that_starts_fresh_leaves_the_count_of_steps(tmp_path):
    case = Case("adam", config={"ckpt_allow_missing_optim_state": ("max_exp_avg_sq",)}, ddp=PLAIN)
    case = replace(case, config=case.config | PLAIN)
    run_ranks(1, save_one, case, str(tmp_path))
    assert run_ranks(1, counts_with_maxima, case, str(tmp_path)) == [{2}]
