"""Saving and resuming through megatron-core's distributed checkpoints."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from tests.harness import run_ranks
from tests.unit.stores.runs import (
    DENSE,
    MOE,
    Result,
    Run,
    inject,
    make_chunk,
    make_config,
    make_optimizer,
    set_lr,
    weights,
)

BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 3000}


def unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def sharded_state(chunk: Any, optimizer: Any, form: str, *, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}
    model = unwrapped(chunk).sharded_state_dict(metadata=metadata)
    # the optimizer's is made from the same, and neither may see what the other changes
    state = optimizer.sharded_state_dict(
        unwrapped(chunk).sharded_state_dict(metadata=metadata),
        is_loading=is_loading,
        metadata=metadata,
    )
    return {"model": model, "optimizer": state}


def save(run: Run, folder: str, form: str) -> Result:
    """Step, save, step on."""
    chunk = make_chunk(run)
    optimizer = make_optimizer(run, chunk)
    set_lr(optimizer, make_config(run))
    for step in range(4):
        optimizer.zero_grad()
        inject(run, chunk, step)
        optimizer.step()
        if step == 1:
            state = sharded_state(chunk, optimizer, form, is_loading=False)
            dist_checkpointing.save(state, folder)
    return Result(weights(run, chunk), [])


def resume(run: Run, folder: str, form: str) -> Result:
    """Load into a fresh model and do the last two steps."""
    chunk = make_chunk(run)
    for param in chunk.parameters():
        param.data.zero_()
    optimizer = make_optimizer(run, chunk)
    wanted = sharded_state(chunk, optimizer, form, is_loading=True)
    loaded = dist_checkpointing.load(wanted, folder)
    unwrapped(chunk).load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    set_lr(optimizer, make_config(run))
    for step in range(2, 4):
        optimizer.zero_grad()
        inject(run, chunk, step)
        optimizer.step()
    return Result(weights(run, chunk), [])


@pytest.mark.parametrize(
    ("form", "world", "dtype"),
    [
        ("fully_reshardable", 1, torch.bfloat16),
        ("fully_reshardable", 2, torch.float32),
        ("fully_reshardable", 4, torch.bfloat16),
        ("dp_reshardable", 2, torch.bfloat16),
        ("dp_reshardable", 1, torch.float32),
    ],
)
def test_resuming_equals_not_stopping(tmp_path, form, world, dtype):
    run = Run(model=DENSE | {"dtype": dtype}, config={"bf16": dtype == torch.bfloat16})
    run = replace(run, config=run.config | {"clip_grad": 0.0})
    uninterrupted = run_ranks(2, save, run, str(tmp_path), form)
    resumed = run_ranks(world, resume, run, str(tmp_path), form)
    # without clipping no number depends on where the fragments are cut
    for result in resumed:
        for name, (_, weight) in result.weights.items():
            assert torch.equal(weight, uninterrupted[0].weights[name][1]), name


PADDED = {"overlap_grad_reduce": True, "bucket_size": 3000, "pad_buckets_for_high_nccl_busbw": True}


@pytest.mark.parametrize(
    "form", ["fully_reshardable", pytest.param("dp_reshardable", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    ("model", "ddp", "parallel"),
    [(DENSE, PADDED, {}), (MOE, {}, {"ep": 2}), (DENSE, {"use_distributed_optimizer": False}, {})],
    ids=["padded buckets", "moe", "all-reduce"],
)
def test_other_layouts_resume_too(tmp_path, model, ddp, parallel, form):
    run = Run(model=model, ddp=ddp, parallel=parallel, config={"clip_grad": 0.0})
    uninterrupted = run_ranks(2, save, run, str(tmp_path), form)
    resumed = run_ranks(2, resume, run, str(tmp_path), form)
    for before, after in zip(uninterrupted, resumed, strict=True):
        for name, (_, weight) in after.weights.items():
            assert torch.equal(weight, before.weights[name][1]), name
