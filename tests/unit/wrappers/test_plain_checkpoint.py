"""Distributed checkpoints of the plain storage: all optimizers, all layouts, and stock's own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_eopt import checkpoints
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import RankError, run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.storage.full_state import (
    Case,
    build,
    differences,
    full_state,
    interrupted,
    load,
    save,
    sharded,
    steps,
)
from tests.unit.storage.runs import PLAIN

SMALL = {"layers": 1, "gated": True, "query_groups": 2, "position_embedding": "rope"}
BF16 = {**SMALL, "layers": 2, "dtype": torch.bfloat16}
METHODS = ("adamuon", "normuon", "namo")


def plain(name: str, model: dict[str, Any] = SMALL, **config: Any) -> Case:
    return Case(name, model, ddp=PLAIN, config={**PLAIN, "sgd_momentum": 0.9, **config})


ADAPTIVE = [plain("adaptive_muon", BF16, adaptive_muon_moment2_method=name) for name in METHODS]
# what tests/functional/test_resume_matrix.py does not have
KINDS = [
    *(plain(name) for name in ("adam", "muon", "soap", "psgd_pro")),
    replace(plain("muon", BF16), float32="norm"),
]
# only the last pipeline stage has a parameter of Adam
TO_ADAM = {"overrides": {"*output_layer*": "adam"}, "parallel": {"pp": 2}}
LAST = replace(plain("lion", {**SMALL, "layers": 2}), **TO_ADAM)


@pytest.mark.parametrize(
    ("ranks", "cases"), mostly_long([(1, KINDS), (2, [LAST])], (1, KINDS)), ids=["kinds", "last"]
)
def test_every_kind_of_optimizer_continues(tmp_path, ranks, cases):
    both = run_ranks(ranks, interrupted, cases, str(tmp_path), timeout=300)[0]
    for case, whole, resumed in zip(cases, *both, strict=True):
        assert not differences(whole, resumed), case
        # so that nothing was compared with nothing
        assert [key for key in whole if "state." in key and "mlp.linear_fc2" in key], case


def saved_in_background(case: Case, folder: str) -> list[str]:
    """Return what differs if training goes on while a checkpoint is written."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    before = full_state(case, chunk, optimizer)
    state = sharded(case, chunk, optimizer, is_loading=False)
    calls = AsyncCallsQueue()
    if torch.distributed.get_rank() == 0:
        (Path(folder) / "0").mkdir()
    torch.distributed.barrier()
    how = {"async_sharded_save": True, "async_strategy": "mcore"}
    calls.schedule_async_request(dist_checkpointing.save(state, f"{folder}/0", **how))
    steps(case, chunk, optimizer, 2, 4)
    calls.maybe_finalize_async_calls(blocking=True)
    calls.close()
    forget_megatron()
    found = load([case], folder)
    return differences(before, found[0]) if found else []


@pytest.mark.parametrize(
    "case",
    [pytest.param(plain("muon", BF16), marks=pytest.mark.long), Case("muon", BF16)],
    ids=["plain", "sharded"],
)
def test_a_checkpoint_may_be_written_in_the_background(tmp_path, case):
    assert run_ranks(2, saved_in_background, case, str(tmp_path)) == [[], []]


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
    ours = [replace(case, stock=False, config=case.config | KINDRED) for case in STOCK]
    writes, reads = (STOCK, ours) if by_stock else (ours, STOCK)
    saved = run_ranks(1, save, writes, str(tmp_path))[0]
    loaded = run_ranks(1, load, reads, str(tmp_path))[0]
    for case, one, other in zip(STOCK, saved, loaded, strict=True):
        both = one.keys() & other.keys()
        assert [key for key in both if "state." in key and "linear_fc2" in key], case
        assert not differences({k: one[k] for k in both}, {k: other[k] for k in both}), case


KINDRED = {"muon_split_gated": False}
"""With it our Muon has the matrices of megatron-core's."""
