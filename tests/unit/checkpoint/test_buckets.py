"""megatron-core's Adam and ours read each other's checkpoints, buckets at one TP, PP and EP."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_eopt import checkpoints
from megatron_eopt.checkpoint.buckets import _starts
from megatron_eopt.testing.scene import forget_megatron
from tests.functional.saved_states import by_kind, tensors_in
from tests.harness import run_ranks
from tests.unit.storage.full_state import (
    Case,
    build,
    differences,
    full_state,
    load,
    resume,
    sharded,
    steps,
    unwrapped,
    write,
)
from tests.unit.storage.runs import MOE, REPLICATED
from tests.unit.storage.test_resharding import BF16, SMALL_BUCKETS

TIED = {**BF16, "untied": False}
OF_STOCK = [
    Case("adam", BF16, ddp=SMALL_BUCKETS, form="dp_reshardable", stock=True),
    Case("adam", TIED, form="dp_reshardable", stock=True),
    Case("adam", {**MOE, "dtype": torch.bfloat16}, form="dp_reshardable", stock=True),
]


def written(cases: list[Case], folder: str) -> list[dict[Any, torch.Tensor]]:
    """For each case step twice and save; return the moments, which our own Adam has by name.

    In several buckets, megatron-core's own form by parameter mixes parameters up.
    """
    found = []
    for number, case in enumerate(cases):
        for one in (case, replace(case, stock=False)):
            chunk, optimizer = build(one)
            steps(one, chunk, optimizer, 0, 2)
            if one.stock:
                write(one, chunk, optimizer, Path(folder, str(number)))
            else:
                found.append(moments(full_state(one, chunk, optimizer)))
            forget_megatron()
    return found


def moments(state: dict[str, Any]) -> dict[Any, torch.Tensor]:
    """Return the moments of all parameters."""
    found = {key: v for key, v in by_kind(state).items() if key[0] in ("exp_avg", "exp_avg_sq")}
    assert found
    return found


@pytest.mark.parametrize(
    ("ranks", "layout", "readers", "other"),
    [
        (2, {}, 1, {}),
        (2, {"tp": 2}, 2, {}),
        pytest.param(2, {"pp": 2}, 4, {}, marks=pytest.mark.long),
        pytest.param(4, {"tp": 2}, 2, REPLICATED, marks=pytest.mark.long),
        pytest.param(4, {"tp": 2, "pp": 2}, 4, {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_stocks_buckets_load_with_any_data_parallelism(tmp_path, ranks, layout, readers, other):
    cases = [replace(case, parallel=layout) for case in OF_STOCK]
    if "pp" in layout:  # where injected gradients of tied weights would differ
        cases = [case for case in cases if case.model.get("untied", True)]
    theirs = run_ranks(ranks, written, cases, str(tmp_path), timeout=300)[0]
    ours = [replace(case, stock=False, **other) for case in cases]
    loaded = run_ranks(readers, load, ours, str(tmp_path), 0, checkpoints.load, timeout=300)[0]
    for case, before, after in zip(ours, theirs, map(moments, loaded), strict=True):
        assert before.keys() == after.keys()
        for key, value in before.items():
            # moments depend on gradients alone; two sums of float32
            torch.testing.assert_close(
                after[key], value, rtol=1e-6, atol=1e-9, msg=str((case, key))
            )


def refusal(case: Case, folder: str) -> str:
    """Return the error of a load, which changes nothing."""
    chunk, optimizer = build(case)
    before = [param.detach().clone() for param in chunk.parameters()]
    asked = sharded(case, chunk, optimizer, is_loading=True)
    try:
        checkpoints.load(asked, folder)
    except ValueError as error:
        assert all(map(torch.equal, before, chunk.parameters()))
        return str(error)
    return ""


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("muon", marks=pytest.mark.long)])
def test_another_layout_is_refused_with_the_way_out(tmp_path, optimizer):
    run_ranks(2, written, [replace(OF_STOCK[0], parallel={"tp": 2})], str(tmp_path))
    for ranks, parallel in ((1, {}), (2, {}), (2, {"pp": 2})):
        case = Case(optimizer, BF16, parallel)
        for error in run_ranks(ranks, refusal, case, str(tmp_path / "0")):
            assert "do not fill its buckets" in error
            assert "save once" in error


def saved_as_asked(case: Case, folder: str) -> dict[Any, torch.Tensor]:
    """Save as Megatron's trainer does, which asks for buckets by default."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 2)
    form = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
    model, its = (unwrapped(chunk).sharded_state_dict() for _ in range(2))
    state = {"model": model, "optimizer": optimizer.sharded_state_dict(its, metadata=form)}
    # the optimizer has written there what it saves
    dist_checkpointing.save(state, folder, content_metadata=form)
    return moments(tensors_in(Path(folder)))


def stepped(case: Case, _: None) -> tuple[Any, Any]:
    """Over torch's Adam, megatron-core can load only after a step."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    return chunk, optimizer


def read_by_stock(case: Case, folder: str) -> dict[Any, torch.Tensor]:
    """Load as Megatron's trainer does, by what the checkpoint says, and save again."""
    said = dist_checkpointing.load_content_metadata(folder)
    case = replace(case, form=said["distrib_optim_sharding_type"])
    original: Any = DistributedOptimizer._set_main_param_and_optimizer_states

    def counting(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        # torch's Adam has its count in its state, where megatron-core looks for it; fused ones not
        original(self, param, {"step": torch.tensor(2.0), **tensors})

    with mock.patch.object(DistributedOptimizer, original.__name__, counting):
        chunk, optimizer = resume(case, folder, dist_checkpointing.load, make=stepped)
    again = Path(folder, "again")
    write(case, chunk, optimizer, again)
    return moments(tensors_in(again))


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [pytest.param(2, {}, marks=pytest.mark.long), (2, {"tp": 2}), (1, {})],
    ids=str,
)
def test_megatron_core_reads_what_this_package_writes(tmp_path, ranks, parallel):
    ours = Case("adam", BF16)
    mine = run_ranks(2, saved_as_asked, ours, str(tmp_path))[0]
    stock = replace(ours, stock=True, parallel=parallel)
    theirs = run_ranks(ranks, read_by_stock, stock, str(tmp_path))[0]
    assert not differences(mine, theirs)


@given(numels=st.lists(st.integers(1, 300), min_size=1), most=st.integers(1, 600))
def test_every_parameter_is_found_and_no_other_size_fits(numels, most):
    """megatron-core fills buckets in order, and ends one when it has this many elements."""
    sizes, places, end = [0], [], 0
    for numel in numels:
        if end >= most:
            sizes.append(0)
            end = 0
        start = -(-end // 64) * 64
        places.append((len(sizes) - 1, start))
        end = start + numel
        sizes[-1] = end
    found = _starts(sizes, numels)
    # parameters that would also fit into the bucket before were not put there
    if found is not None and found != places:
        assert len(sizes) > 1
    assert found is not None
    assert _starts([*sizes[:-1], sizes[-1] + 64], numels) is None
