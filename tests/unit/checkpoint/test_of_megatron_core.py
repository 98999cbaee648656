"""Optimizers of megatron-core and ours read each other's checkpoints.

Adam's buckets do so at one TP, PP and EP, and those of layer-wise ``dist_muon``, padded or not.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.training.training import wrap_model_chunks_with_ddp

from megatron_eopt import checkpoints
from megatron_eopt.checkpoint.buckets import _fit, _starts
from megatron_eopt.testing.scene import forget_megatron
from tests.functional.saved_states import by_kind, tensors_in
from tests.harness import run_ranks
from tests.harness.models import copies_of
from tests.harness.tiers import mostly_long
from tests.unit.storage import full_state
from tests.unit.storage.full_state import Case, build, load, resume, steps, unwrapped, write
from tests.unit.storage.runs import DENSE, MOE, REPLICATED, make_chunk
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
                found.append(moments(full_state.full_state(one, chunk, optimizer)))
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
        (1, {}, 2, {}),
        pytest.param(2, {"tp": 2}, 2, {}, marks=pytest.mark.long),
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


def refused(case: Case, folder: str) -> None:
    """Try to load, which changes nothing."""
    chunk, optimizer = build(case)
    before = [param.detach().clone() for param in chunk.parameters()]
    asked = full_state.sharded(case, chunk, optimizer, is_loading=True)
    with pytest.raises(ValueError, match=r"do not fill its buckets.*save once"):
        checkpoints.load(asked, folder)
    assert all(map(torch.equal, before, chunk.parameters()))


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("muon", marks=pytest.mark.long)])
def test_another_layout_is_refused_with_the_way_out(tmp_path, optimizer):
    run_ranks(2, written, [replace(OF_STOCK[0], parallel={"tp": 2})], str(tmp_path))
    for ranks, parallel in ((1, {}), (2, {}), (2, {"pp": 2})):
        run_ranks(ranks, refused, Case(optimizer, BF16, parallel), str(tmp_path / "0"))


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
    assert not full_state.differences(mine, theirs)


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


def test_parameters_of_each_dtype_fill_buffers_of_their_own():
    half, single = torch.bfloat16, torch.float32
    sizes = (64, half), (32, single), (128, half)
    first, other, last = (torch.empty(size, dtype=dtype) for size, dtype in sizes)
    buffers = {0: (str(half), [("in half", 192)]), 1: (str(single), [("in whole", 32)])}
    # megatron-core lays out the last parameter first
    places = {last: ("in half", 0), first: ("in half", 128), other: ("in whole", 0)}
    assert _fit([[first, other, last]], buffers) == places
    # a rank without the float32 parameter, sizes that fill the last bucket, and those that do not
    assert _fit([[first, last]], buffers) is None
    assert _starts([64], [64, 1]) is _starts([64, 64], [64]) is None


# megatron-core's Muon also updates learned position embeddings
ROPE = {"dtype": torch.bfloat16, "position_embedding": "rope"}
MODELS = {
    "dense": Case("muon", {**DENSE, "query_groups": 4, **ROPE}),
    "experts": Case("muon", {**MOE, **ROPE}),
}
STORAGES: dict[str, Any] = {"sharded": {}, "replicated": REPLICATED}
ALIKE = {"muon_tp_mode": "duplicated", "muon_scale_mode": "spectral", "muon_split_gated": False}
ALIKE["muon_nesterov"] = False
"""With these, our Muon has the matrices and scales of megatron-core's."""

LAYER_WISE = {"use_layer_wise_distributed_optimizer": True, "use_distributed_optimizer": False}


def of_stock(case: Case, padded: bool) -> tuple[Any, Any]:
    """Return a model and megatron-core's layer-wise optimizer, as its trainer builds them."""

    def wrap(model: Any, **_: Any) -> Any:
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        kinds = {"use_layer_wise_param_layout": padded}
        kinds["use_layer_wise_distributed_optimizer"] = True
        return wrap_model_chunks_with_ddp([model], model.config, ddp, **kinds)[0]

    stock = replace(case, stock=True, config=LAYER_WISE)
    chunk = make_chunk(stock.run, wrap)
    return chunk, full_state.optimizer_over(stock, [chunk])


def save_stock(case: Case, padded: bool, folder: str) -> dict[str, torch.Tensor]:
    """Step twice, save, and step twice more; return this rank's weights."""
    chunk, optimizer = of_stock(case, padded)
    steps(case, chunk, optimizer, 0, 2)
    write(case, chunk, optimizer, folder)
    steps(case, chunk, optimizer, 2, 4)
    return copies_of(unwrapped(chunk))


def go_on(case: Case, folder: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Load, and step twice; return the whole state that was loaded and this rank's weights."""
    chunk, optimizer = resume(case, folder)
    loaded = full_state.full_state(case, chunk, optimizer)
    steps(case, chunk, optimizer, 2, 4)
    return loaded, copies_of(unwrapped(chunk))


@pytest.mark.parametrize(
    ("model", "ranks", "layout", "storage"),
    mostly_long(
        itertools.product(MODELS, (1, 2), ("padded", "padded, by bucket", "by size"), STORAGES),
        ("dense", 2, "padded, by bucket", "sharded"),
        ("experts", 2, "by size", "replicated"),
    ),
)
def test_what_dist_muon_saves_is_resumed(tmp_path, model, ranks, layout, storage):
    case = replace(MODELS[model], parallel={"ep": ranks} if model == "experts" else {})
    if layout == "padded, by bucket":  # Megatron's default
        case = replace(case, form="dp_reshardable")
    weights = run_ranks(ranks, save_stock, case, "padded" in layout, str(tmp_path))
    ours = replace(case, **STORAGES[storage])
    ours = replace(ours, config={**ours.config, **ALIKE})
    found = run_ranks(ranks, go_on, ours, str(tmp_path))
    saved, loaded = by_kind(tensors_in(Path(tmp_path))), by_kind(found[0][0])
    named = {"param", "momentum_buffer"}
    if "bucket" not in layout:
        named |= {"exp_avg", "exp_avg_sq"}
    assert {kind for kind, _ in saved} == named
    assert not [name for name in saved if not torch.equal(saved[name], loaded[name])]
    for theirs, (_, mine) in zip(weights, found, strict=True):
        for name, weight in theirs.items():
            # bf16 weights, after two steps whose float32 sums have another order
            assert torch.allclose(mine[name].float(), weight.float(), atol=2e-3, rtol=8e-3), name


def resume_in_stock(case: Case, folder: str) -> None:
    def make(*_: Any) -> tuple[Any, Any]:
        return of_stock(case, padded=False)

    loaded = resume(case, folder, dist_checkpointing.load, make=make)
    write(case, *loaded, Path(folder, "again"))


def test_dist_muon_resumes_ours(tmp_path):
    ours = replace(MODELS["dense"], **REPLICATED)
    run_ranks(2, full_state.save_one, ours, str(tmp_path))
    run_ranks(2, resume_in_stock, MODELS["dense"], str(tmp_path))
    mine, theirs = (by_kind(tensors_in(place)) for place in (tmp_path, tmp_path / "again"))
    assert theirs
    assert not [name for name in theirs if not torch.equal(mine[name], theirs[name])]
