"""What is saved at one layout loads at any other, bit by bit: weights, main weights, all state."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_eopt import checkpoints
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.storage import full_state, runs
from tests.unit.storage.full_state import Case, differences, load, resume, save, steps, write
from tests.unit.storage.runs import DENSE, INSTANCES, MOE, NORMUON, PLAIN, REPLICATED
from tests.unit.storage.test_layouts import TOLERANCE

BF16 = {**DENSE, "query_groups": 4, "dtype": torch.bfloat16}
MATCHED = (0, checkpoints.load)
"""No further step, and our function, which looks at what there is before megatron-core reads."""
FIRST = "layers.0."
APART = [
    # state that not all layers have: some are frozen, or have another optimizer
    Case("muon", BF16, frozen=FIRST),
    Case("adam", BF16, frozen=FIRST),
    Case("soap", DENSE, frozen=FIRST),
    Case("muon", MOE, frozen="local_experts.1."),
    Case("muon", DENSE, overrides={"*layers.0.mlp*weight": "adam"}),
]
USUAL = [
    Case("adaptive_muon", BF16, config=NORMUON),
    Case("muon", BF16, config={"muon_momentum_dtype": "int8"}),
]
OPTIMIZERS = [*USUAL, *(Case(name, BF16) for name in ("muon", "adam", "soap", "lion"))]


def at(cases: list[Case], **parallel: int) -> list[Case]:
    return [replace(case, parallel=parallel) for case in cases]


def check(saved: list, loaded: list, cases: list[Case]) -> None:
    for case, before, after in zip(cases, saved, loaded, strict=True):
        assert not differences(before, after), case


@pytest.mark.long
def test_other_layouts_load_it(tmp_path):
    states = run_ranks(4, save, at(OPTIMIZERS, tp=2), str(tmp_path), timeout=300)[0]
    for parallel in ({}, {"tp": 4}, {"tp": 2, "pp": 2}):
        cases = at(OPTIMIZERS, **parallel)
        check(states, run_ranks(4, load, cases, str(tmp_path), timeout=300)[0], cases)


SMALL_BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 3000}
ONE_LAYER = {**runs.SHARED_EXPERTS, "layers": 1}
EXACT = {"muon_fp32_matmul_prec": "highest", "clip_grad": 0.0}
BF16_MOMENTUM = EXACT | {"muon_momentum_dtype": "bf16"}
THROUGH = [(2, {"parallel": {"tp": 2, "etp": 1}}), (4, INSTANCES), (2, {"parallel": {"etp": 2}})]
ROUNDS: dict[str, tuple[list[Case], list[tuple[int, dict[str, Any]]]]] = {
    "sharded": (
        [Case("muon", ONE_LAYER, config=BF16_MOMENTUM), Case("psgd_pro", ONE_LAYER, config=EXACT)],
        THROUGH,
    ),
    "sharded, others": (
        [Case("muon", ONE_LAYER, config=EXACT), Case("adam", ONE_LAYER, config=EXACT)],
        THROUGH,
    ),
    "replicated": (
        [
            Case("muon", ONE_LAYER, ddp=PLAIN, config=PLAIN | EXACT),
            Case("muon", ONE_LAYER, ddp=PLAIN, config=PLAIN | BF16_MOMENTUM),
        ],
        [(2, {"parallel": {"etp": 2}}), (2, {"parallel": {"tp": 2, "etp": 1}})],
    ),
}
"""Runs, and the layouts through which each of them goes on: how many ranks, and their fields."""


def one_further(
    cases: list[Case], before: str, after: str, step: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Load each run, do a step, and save it; return the whole states as loaded and as saved."""
    loaded, saved = [], []
    for number, case in enumerate(cases):
        chunk, optimizer = resume(case, Path(before, str(number)))
        loaded.append(full_state.full_state(case, chunk, optimizer))
        steps(case, chunk, optimizer, step, step + 1)
        write(case, chunk, optimizer, Path(after, str(number)))
        saved.append(full_state.full_state(case, chunk, optimizer))
        forget_megatron()
    return loaded, saved


@pytest.mark.parametrize("name", mostly_long(ROUNDS, "sharded", "replicated"))
def test_a_run_that_changes_its_layout_after_every_step_equals_one_process(tmp_path, name):
    """Loaded are the bits that were saved; noise of rounding and draws follow from the run."""
    cases, layouts = ROUNDS[name]
    folders = [str(tmp_path / str(number)) for number in range(len(layouts) + 1)]
    for folder in folders:
        Path(folder).mkdir()
    saved, expected = run_ranks(1, full_state.stopped, cases, folders[0], 2 + len(layouts))[0]
    for place, (world, fields) in enumerate(layouts):
        own = [replace(case, **fields) for case in cases]
        loaded, after = run_ranks(
            world, one_further, own, *folders[place : place + 2], 2 + place, timeout=300
        )[0]
        check(saved, loaded, own)
        saved = after
    for case, state, other in zip(cases, saved, expected, strict=True):
        momenta = [key for key in other if "momentum_buffer" in key]
        assert len(momenta) >= 4 or case.optimizer != "muon"
        assert not differences({k: state[k] for k in momenta}, {k: other[k] for k in momenta})
        for key, value in other.items():
            if isinstance(value, torch.Tensor):
                far = float((state[key] - value).norm() / value.norm().clamp(min=1e-30))
                assert far < TOLERANCE, (case, key)


def test_layers_apart(tmp_path):
    folder = str(tmp_path)
    saved = run_ranks(2, save, APART, folder)[0]
    check(saved, run_ranks(2, load, at(APART, tp=2), folder, *MATCHED)[0], APART)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(96, 160), (160, 96)], ids=["more", "less"])
def test_a_vocabulary_that_is_padded_otherwise(tmp_path, before, after):
    """Megatron pads it to a multiple of the tensor-parallel size; new rows copy the last one."""
    f32, bf16 = DENSE, {**DENSE, "dtype": torch.bfloat16}
    cases = [Case("muon", f32), Case("adam", bf16)]
    cases += [Case("adam", f32, **REPLICATED), Case("muon", bf16, **REPLICATED)]
    first, second = (
        [replace(case, model={**case.model, "vocabulary": size}) for case in cases]
        for size in (before, after)
    )
    saved = run_ranks(2, save, first, str(tmp_path))[0]
    loaded = run_ranks(2, load, at(second, tp=2), str(tmp_path), *MATCHED)[0]
    for one, other in zip(saved, loaded, strict=True):
        assert one.keys() == other.keys()
        embedding = [k for k in one if "word_embeddings" in k or "output_layer" in k]
        assert any("exp_avg" in key for key in embedding)
        rows = min(before, after)
        for key in embedding:
            last, found = one.pop(key)[: rows + 1], other.pop(key)
            assert torch.equal(last[:rows], found[:rows])
            assert all(torch.equal(row, last[rows - 1]) for row in found[rows:])
        assert not differences(one, other)


@pytest.mark.long
def test_padded_buckets(tmp_path):
    cases = [Case(name, ddp=SMALL_BUCKETS) for name in ("muon", "adam")]
    saved = run_ranks(3, save, cases, str(tmp_path), timeout=300)[0]
    check(saved, run_ranks(3, load, cases, str(tmp_path), timeout=300)[0], cases)


# what tests/functional/test_resume_matrix.py does not have
RESUMED = [
    # fragments of gradients that DDP all-reduces
    *(Case("muon", model, ddp=PLAIN) for model in (DENSE, BF16)),
    *USUAL,
    *APART,
    replace(APART[0], **REPLICATED),
]


@pytest.mark.long
def test_resuming_equals_not_stopping(tmp_path):
    whole, resumed = run_ranks(2, full_state.interrupted, RESUMED, str(tmp_path), timeout=300)[0]
    check(whole, resumed, RESUMED)
