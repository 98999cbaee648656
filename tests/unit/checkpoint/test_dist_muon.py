"""Checkpoints of megatron-core's layer-wise ``dist_muon``, padded or not, load here and go on."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.training.training import wrap_model_chunks_with_ddp

from tests.functional.saved_states import by_kind, tensors_in
from tests.harness import run_ranks
from tests.harness.models import copies_of
from tests.harness.tiers import mostly_long
from tests.unit.storage.full_state import (
    Case,
    full_state,
    optimizer_over,
    resume,
    save_one,
    steps,
    unwrapped,
    write,
)
from tests.unit.storage.runs import DENSE, MOE, REPLICATED, make_chunk

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
    return chunk, optimizer_over(stock, [chunk])


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
    loaded = full_state(case, chunk, optimizer)
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
    run_ranks(2, save_one, ours, str(tmp_path))
    run_ranks(2, resume_in_stock, MODELS["dense"], str(tmp_path))
    mine, theirs = (by_kind(tensors_in(place)) for place in (tmp_path, tmp_path / "again"))
    assert theirs
    assert not [name for name in theirs if not torch.equal(mine[name], theirs[name])]
