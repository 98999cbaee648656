"""Weight rematerialization (GTP) cuts rows once more: the same update as in one process."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_eopt import checkpoints
from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint import optimizer_state
from megatron_eopt.testing.scene import forget_megatron
from megatron_eopt.wrappers.gradients import GradNorm
from tests.harness import run_ranks
from tests.harness.collectives import counted
from tests.harness.each_rank import on_ranks
from tests.harness.models import assert_same, copies_of
from tests.unit.storage import full_state, runs
from tests.unit.storage.full_state import Case, build, differences, load, save_one, steps, stopped
from tests.unit.storage.runs import DENSE, MOE, NORMUON, OVERLAP, PLAIN, Result, weights
from tests.unit.storage.test_layouts import TOLERANCE

LONG = pytest.mark.long
EXACT = {"muon_fp32_matmul_prec": "highest", "clip_grad": 1.0, "log_num_zeros_in_grad": True}
PADDED = {**DENSE, "hidden": 24, "heads": 4, "query_groups": 4}
"""Megatron pads each piece to a multiple of 16 rows: some ranks have nothing but padding."""


def trained(cases: list[Case]) -> list[Result]:
    results = []
    for case in cases:
        chunk, optimizer = build(case)
        amplifies = case.optimizer == "soap" or "muon_momentum_dtype" in case.config
        with alike_factors() if amplifies else nullcontext():
            returned = steps(case, chunk, optimizer, 0, 10)
        results.append(Result(weights(case.run, chunk), returned))
        forget_megatron()
    return results


@contextmanager
def alike_factors() -> Iterator[None]:
    """Round clipping factors to few bits, so that they have the same bits at every layout.

    Norms are summed in float32, as in megatron-core: those of one process and of four ranks are
    each within 1.1e-7 of the sum in float64, and factors differ in their last two bits. Momentum in
    8 bits amplifies that. After ten steps of ``experts``, four ranks are 3.4e-4 from one process,
    but 9.0e-8 with the factors of that process. One process alone is 1.7e-4 from itself if all
    factors are one unit of their last place larger.
    """
    factor = GradNorm.factor

    def rounded(norm: GradNorm, most: Any) -> torch.Tensor:
        return factor(norm, most).bfloat16().float()

    with patch.object(GradNorm, "factor", rounded):
        yield


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"muon_tp_mode": "duplicated"},
    "muon distributed": {"muon_tp_mode": "distributed"},
    "muon exchange": {"muon_tp_mode": "exchange"},
    "muon int8": {"muon_momentum_dtype": "int8"},
    "adaptive_muon": NORMUON,
    "soap": {},
    "adam": {},
}


CUTS: dict[str, tuple[dict[str, Any], tuple[int, dict[str, int]]]] = {
    "padded": (PADDED, (2, {"gtp": 2})),
    "tp": (DENSE, (4, {"gtp": 2, "tp": 2})),
    "experts": (MOE, (4, {"gtp": 2, "expert_gtp": 2, "ep": 2})),
}


@pytest.mark.parametrize(
    ("where", "storage", "names"),
    [
        pytest.param("padded", "sharded", [*OPTIMIZERS], id="padded-sharded"),
        pytest.param("tp", "sharded", ["muon", "muon exchange"], id="tp-sharded-Muon"),
        pytest.param("tp", "replicated", ["muon"], id="tp-replicated-Muon"),
        *(
            pytest.param(where, storage, [*OPTIMIZERS], id=f"{where}-{storage}", marks=LONG)
            for where, storage in product(CUTS, ("sharded", "replicated"))
            if (where, storage) != ("padded", "sharded")
        ),
    ],
)
def test_a_cut_of_rows_changes_no_update(where: str, storage: str, names: list[str]):
    model, (world, parallel) = CUTS[where]
    kept = PLAIN if storage == "replicated" else {}
    cases = [
        Case(n.split()[0], {**model, "layers": 1}, ddp=kept, config=EXACT | kept | OPTIMIZERS[n])
        for n in names
        if storage == "sharded" or n != "soap"
    ]
    references = run_ranks(1, trained, cases)[0]
    found = run_ranks(world, trained, [replace(case, parallel=parallel) for case in cases])
    for case, reference, *its in zip(cases, references, *found, strict=True):
        assert runs.deviation(its, reference) < TOLERANCE, case
        for result in its:
            for (_, norm, _), (_, expected, _) in zip(result.steps, reference.steps, strict=True):
                assert norm == pytest.approx(expected, rel=1e-6), case


# one layer; some ranks have nothing but padding
DENSE_LAYER, EXPERTS = ({**model, "layers": 1, "dtype": torch.bfloat16} for model in (PADDED, MOE))
RESUMED = [
    *(Case(name, DENSE_LAYER) for name in ("muon", "adam", "soap")),
    Case("muon", DENSE_LAYER, ddp=PLAIN, config=PLAIN),
    Case("muon", EXPERTS),
]


def test_the_same_sizes_resume(tmp_path):
    """Also with more data-parallel ranks."""
    cases = [replace(case, parallel={"gtp": 2, "expert_gtp": 2}) for case in RESUMED]
    saved, whole = run_ranks(2, stopped, cases, str(tmp_path), timeout=300)[0]
    resumed = run_ranks(2, load, cases, str(tmp_path), 2, timeout=300)[0]
    loaded = run_ranks(4, load, cases, str(tmp_path))[0]
    for case, *states in zip(cases, whole, resumed, saved, loaded, strict=True):
        assert not differences(*states[:2]), case
        assert not differences(*states[2:]), case


def other_rows(case: Case, folder: str) -> str:
    chunk, optimizer = build(case)
    before = copies_of(chunk)
    wanted = full_state.sharded(case, chunk, optimizer, is_loading=True)
    with pytest.raises(CheckpointError) as error:
        checkpoints.load(wanted, folder)
    assert_same(copies_of(chunk), before)
    return str(error.value)


ON_4_RANKS = [(4, {"gtp": 4}), (4, {"gtp": 2, "tp": 2})]


@pytest.mark.parametrize(
    ("model", "before", "ranks", "others"),
    [
        (DENSE_LAYER, {"gtp": 2}, 2, [(2, {}), (2, {"tp": 2})]),
        pytest.param(DENSE_LAYER, {"gtp": 2}, 2, ON_4_RANKS, marks=LONG),
        (EXPERTS, {"gtp": 2, "expert_gtp": 1}, 1, [(2, {"gtp": 2, "expert_gtp": 2})]),
    ],
    ids=["dense", "dense on 4 ranks", "experts"],
)
def test_other_sizes_are_refused(tmp_path, model, before, ranks, others):
    sizes = f"over {ranks} ranks and tensor parallelism over 1"
    case = Case("muon", model)
    run_ranks(2, save_one, replace(case, parallel=before), str(tmp_path))
    for world, parallel in others:
        after = replace(case, parallel=parallel)
        first, *errors = run_ranks(world, other_rows, after, str(tmp_path))
        assert "the rows of its weights" in first
        assert f"was written with weight rematerialization {sizes}" in first
        assert errors == [first] * (world - 1)


@on_ranks(2)
def test_state_in_the_order_of_rows_of_an_earlier_version_is_refused(tmp_path):
    case = Case("muon", DENSE_LAYER, {"gtp": 2})
    # without the mark of the order of rows, which earlier versions did not have
    with patch.object(optimizer_state, "any_rank", return_value=False):
        save_one(case, tmp_path)
    forget_megatron()
    error = other_rows(case, str(tmp_path))
    assert "in the order of rows of an earlier version" in error
    assert "--no-load-optim" in error


@pytest.mark.parametrize(
    ("storage", "gathers"), [({}, 1), pytest.param(PLAIN, 0, marks=LONG)], ids=["sharded", "plain"]
)
@on_ranks(8, timeout=300)
def test_a_step_has_at_most_four_collectives(storage, gathers):
    """One for the norm, two for all matrices, and one of Megatron's, which gathers the weights."""
    model = {**DENSE, "layers": 1, "hidden": 64, "vocabulary": 128}
    config = {"clip_grad": 1.0, "muon_tp_mode": "exchange"} | storage
    case = Case("muon", model, {"gtp": 2, "tp": 2}, ddp=storage, config=config)
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    runs.inject(case.run, chunk, 1)
    with counted() as calls:
        optimizer.step()
    assert [name for name, *_ in calls] == ["all_reduce", "all_to_all_single", "all_to_all_single"]
    is_gathered = chunk.ddp_config.use_distributed_optimizer
    assert (len(chunk.bucket_groups) if is_gathered else 0) == gathers


@pytest.mark.parametrize(
    ("argument", "ddp"),
    [("muon_overlap_dp_comm", OVERLAP), ("tp_mode", {})],
    ids=["overlap", "mode"],
)
@on_ranks(2)
def test_what_needs_whole_slabs_is_refused(argument, ddp):
    config = {"muon_overlap_dp_comm": True} if ddp else {"muon_tp_mode": "blockwise"}
    case = Case("muon", parallel={"gtp": 2}, ddp=ddp, config=config)
    with pytest.raises(ConfigurationError) as error:
        build(case)
    assert error.value.argument == argument
