"""Checkpoints of the plain storage: all optimizers, all layouts, and stock's own.

State is distributed, or as ``state_dict`` returns it and ``--ckpt-format torch`` keeps it.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_eopt import checkpoints
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.local_state import MAIN_NAMES, MAINS_KEY
from megatron_eopt.config.registry import optimizer_names
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import RankError, run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long
from tests.unit.storage import full_state
from tests.unit.storage.full_state import Case, build, differences, load, save, sharded, steps
from tests.unit.storage.runs import DENSE, PLAIN

SMALL = {"layers": 1, "gated": True, "query_groups": 2, "position_embedding": "rope"}
BF16 = {**SMALL, "layers": 2, "dtype": torch.bfloat16}


def plain(name: str, model: dict[str, Any] = SMALL, **config: Any) -> Case:
    return Case(name, model, ddp=PLAIN, config={**PLAIN, "sgd_momentum": 0.9, **config})


ADAPTIVE = [
    plain("adaptive_muon", BF16, adaptive_muon_moment2_method=name)
    for name in ("adamuon", "normuon", "namo")
]
# what tests/functional/test_resume_matrix.py does not have
KINDS = [
    *(plain(name) for name in ("adam", "muon", "soap", "psgd_pro")),
    replace(plain("muon", BF16), float32="norm"),
]
# only the last pipeline stage has a parameter of Adam
TO_ADAM = {"overrides": {"*output_layer*": "adam"}, "parallel": {"pp": 2}}
LAST = replace(plain("lion", {**SMALL, "layers": 2}), **TO_ADAM)
# each tensor-parallel rank has state of its own, which is not cut like the weights
BLOCKWISE = {"adaptive_muon_moment2_method": "normuon", "muon_tp_mode": "blockwise"}
SLABS = [
    replace(case, parallel={"tp": 2})
    for case in (plain("soap"), plain("psgd_pro"), plain("adaptive_muon", **BLOCKWISE))
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    mostly_long([(1, KINDS), (2, [LAST]), (2, SLABS)], (1, KINDS), (2, SLABS)),
    ids=["kinds", "last", "slabs"],
)
def test_every_kind_of_optimizer_continues(tmp_path, ranks, cases):
    both = run_ranks(ranks, full_state.interrupted, cases, str(tmp_path), timeout=300)[0]
    for case, whole, resumed in zip(cases, *both, strict=True):
        assert not differences(whole, resumed), case
        # so that nothing was compared with nothing
        assert [key for key in whole if "state." in key and "mlp.linear_fc2" in key], case


@pytest.mark.parametrize(
    "case",
    [pytest.param(plain("muon", BF16), marks=pytest.mark.long), Case("muon", BF16)],
    ids=["plain", "sharded"],
)
@on_ranks(2)
def test_a_checkpoint_may_be_written_in_the_background(tmp_path, case):
    """Training goes on meanwhile."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    before = full_state.full_state(case, chunk, optimizer)
    state = sharded(case, chunk, optimizer, is_loading=False)
    calls = AsyncCallsQueue()
    if torch.distributed.get_rank() == 0:
        (tmp_path / "0").mkdir()
    torch.distributed.barrier()
    how = {"async_sharded_save": True, "async_strategy": "mcore"}
    calls.schedule_async_request(dist_checkpointing.save(state, f"{tmp_path}/0", **how))
    steps(case, chunk, optimizer, 2, 4)
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()
    forget_megatron()
    found = load([case], str(tmp_path))
    assert not found or not differences(before, found[0])


MOVED = [plain("muon", BF16), *ADAPTIVE[1:]]
MORE = [({}, {"tp": 2}), ({"pp": 2}, {})]


@pytest.mark.parametrize(
    ("before", "after"),
    [({"tp": 2}, {}), *(pytest.param(*way, marks=pytest.mark.long) for way in MORE)],
    ids=["TP 2 to 1", "TP 1 to 2", "PP 2 to 1"],
)
def test_other_layouts_load_it(tmp_path, before, after):
    writes, reads = ([replace(c, parallel=where) for c in MOVED] for where in (before, after))
    saved = run_ranks(2 if before else 1, save, writes, str(tmp_path))[0]
    loaded = run_ranks(2 if after else 1, load, reads, str(tmp_path))[0]
    for case, one, other in zip(MOVED, saved, loaded, strict=True):
        assert not differences(one, other), case


def test_state_of_slabs_is_refused_at_another_size(tmp_path):
    case = plain("soap")
    run_ranks(2, save, [replace(case, parallel={"tp": 2})], str(tmp_path))
    with pytest.raises(RankError, match=r"ConfigurationError: .*must have all state of the same"):
        run_ranks(1, load, [case], str(tmp_path), 0, checkpoints.load)


STOCK = [
    replace(plain(name, {**SMALL, "dtype": dtype}, muon_fp32_matmul_prec="highest"), stock=True)
    for name in ("muon", "adam")
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("by_stock", [True, False], ids=["from stock", "to stock"])
def test_checkpoints_are_megatrons(tmp_path, by_stock):
    # so that our Muon has the matrices of megatron-core's
    kindred = {"muon_split_gated": False}
    ours = [replace(case, stock=False, config=case.config | kindred) for case in STOCK]
    writes, reads = (STOCK, ours) if by_stock else (ours, STOCK)
    saved = run_ranks(1, save, writes, str(tmp_path))[0]
    loaded = run_ranks(1, load, reads, str(tmp_path))[0]
    for case, one, other in zip(STOCK, saved, loaded, strict=True):
        both = one.keys() & other.keys()
        assert [key for key in both if "state." in key and "linear_fc2" in key], case
        assert not differences({k: one[k] for k in both}, {k: other[k] for k in both}), case


IN_BF16 = [
    *(plain(name, BF16) for name in ("muon", "soap", "lion", "adam", "sgd")),
    *ADAPTIVE,
    replace(plain("muon", BF16), float32="norm"),
]
IN_FEW_BITS = [
    Case("muon", DENSE | {"hidden": 48}, {"tp": 2}, PLAIN, PLAIN | {"muon_momentum_dtype": dtype})
    for dtype in ("bf16", "fp8", "int8")
]
CASES = {
    "some, fp32": (1, [plain(name) for name in ("adam", "soap", "adaptive_muon")]),
    "plain, fp32": (1, [plain(name) for name in optimizer_names()]),
    "plain, bf16": (1, IN_BF16),
    "muon in bf16": (1, IN_BF16[:1]),
    "few bits on two ranks": (2, IN_FEW_BITS),
}


def gone_on(cases: list[Case], folder: str) -> None:
    """Compare four steps in one go with two and two, the state going through a file between."""
    for number, case in enumerate(cases):
        place = Path(folder, str(number))
        place.mkdir(exist_ok=True)
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 2)
        weights = full_state.write_as("state_dict", case, chunk, optimizer, place)
        steps(case, chunk, optimizer, 2, 4)
        whole = full_state.full_state(case, chunk, optimizer)
        forget_megatron()
        chunk, optimizer = full_state.resume_as("state_dict", case, place, weights)
        steps(case, chunk, optimizer, 2, 4)
        assert not differences(whole, full_state.full_state(case, chunk, optimizer)), case
        forget_megatron()


@pytest.mark.parametrize(
    "name", mostly_long(CASES, "muon in bf16", "few bits on two ranks", "some, fp32")
)
def test_state_continues(tmp_path, name):
    ranks, cases = CASES[name]
    run_ranks(ranks, gone_on, cases, str(tmp_path), timeout=300)


@on_ranks(1)
def test_state_that_does_not_fit_is_refused():
    muon, adam = plain("muon"), plain("adam")
    states = {"muon": build(muon)[1].state_dict(), "adam": build(adam)[1].state_dict()}
    # three groups of Adam, where two are wanted, and no names of their parameters
    regrouped = build(plain("adam", decoupled_lr=0.1))[1].state_dict()
    del regrouped["param_names"]
    nameless = {key: value for key, value in states["adam"].items() if key != "param_names"}
    # as many elements in another shape
    turned = copy.deepcopy(states["adam"])
    moments = next(kept for kept in turned["state"].values() if len({*kept["exp_avg"].shape}) == 2)
    moments["exp_avg"] = moments["exp_avg"].mT
    wrong = [
        (muon, nameless, "state of 1 optimizers"),
        (adam, regrouped, "has .'adam/dense/"),
        (adam, turned, "exp_avg of shape"),
    ]
    for case, state, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            build(case)[1].load_state_dict(state)


@on_ranks(1)
def test_main_weights_that_nobody_names_are_those_of_16_bit_parameters():
    """As in megatron-core's own files."""
    case = replace(plain("muon", BF16), float32="norm")
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for part in saved:
        del part[MAIN_NAMES]
    other, resumed = build(case)
    full_state.unwrapped(other).load_state_dict(full_state.unwrapped(chunk).state_dict())
    resumed.load_state_dict(copy.deepcopy(saved))
    whole = full_state.full_state(case, chunk, optimizer)
    assert not differences(whole, full_state.full_state(case, other, resumed))
    *mains, last = saved[0][MAINS_KEY][0]
    for wrong, words in (([], "does not name them"), ([last[1:]], "of shape")):
        saved[0][MAINS_KEY][0] = [*mains, *wrong]
        with pytest.raises(ConfigurationError, match=f"main weights .*{words}"):
            resumed.load_state_dict(saved)


@on_ranks(1)
def test_resume_with_another_learning_rate():
    """Groups keep their identity over a resume, also with another learning rate."""
    dtypes = (torch.float32, torch.bfloat16)
    cases = [
        plain(name, {**SMALL, "dtype": dtype}, decoupled_lr=0.02)
        for dtype in dtypes
        for name in ("adam", "muon")
    ]
    for case in (*cases, replace(cases[0], stock=True)):
        chunk, saved = build(case)
        for group in saved.param_groups:
            group["lr"] = group["max_lr"]
        steps(case, chunk, saved, 0, 1)
        state = copy.deepcopy(saved.state_dict())
        before = str(state)
        lr = 0.01 if case.stock else 0.05
        config = {**case.config, "lr": lr, "decoupled_lr": 2 * lr}
        _, resumed = build(replace(case, stock=False, config=config))
        resumed.load_state_dict(state)
        assert str(state) == before
        assert {group["max_lr"] for group in resumed.param_groups} == {lr, 2 * lr}
        # the checkpoint's, but this run's override, which begins where the schedule has come to
        assert {group["lr"] for group in resumed.param_groups} == {0.01, 2 * lr}
        forget_megatron()


@on_ranks(1)
def test_an_optimizer_in_a_chain_saves_and_loads_its_own_state():
    """As a user's own code does."""
    case = replace(IN_FEW_BITS[2], parallel={})
    chunk, chain = build(case)
    steps(case, chunk, chain, 0, 2)
    (member, *_) = chain.chained_optimizers
    inner = member.optimizer
    (first, *_) = inner.state
    kept = {kind: tensor.clone() for kind, tensor in inner.state[first].items()}
    saved = inner.state_dict()
    assert saved["state"][0]["momentum_buffer"].dtype == torch.float32
    inner.load_state_dict(saved)
    (loaded, *_) = inner.state
    assert inner.state[loaded].keys() == kept.keys()
    assert inner.state[loaded]["momentum_buffer"].dtype == kept["momentum_buffer"].dtype
    # megatron-core's wrapper calls it before it loads
    member.init_state_fn(inner, member.config)
    inner.state.clear()
    assert not inner.state_dict()["state"]
    assert not inner.state
    new = torch.nn.Parameter(torch.ones(4, 4))
    inner.param_groups[0]["params"].append(new)
    with pytest.raises(ConfigurationError, match="new parameter"):
        inner.step()
