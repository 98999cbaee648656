"""Unmodified megatron-core trains on CPU processes; all other tests of layouts do so with us."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp


@dataclass(frozen=True)
class Case:
    ranks: int
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


OVERLAP = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 5000,  # several buckets, so that they are coalesced
}

CASES = {
    "dp2, overlapped, bf16": Case(2, model={"dtype": torch.bfloat16}, ddp=OVERLAP),
    "tp2, dropout": Case(2, {"tp": 2}, model={"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "pp2, interleaved": Case(2, {"pp": 2, "virtual_pp": 2}, {"layers": 4}),
    "ep2, recomputed": Case(
        2,
        {"ep": 2},
        {
            "experts": 4,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "two instances, overlapped": Case(
        4,
        {"optimizer_instances": 2},
        ddp=OVERLAP | {"num_distributed_optimizer_instances": 2},
    ),
    "layer-wise muon": Case(
        2,
        model={"dtype": torch.bfloat16},
        optimizer={"optimizer": "muon", "use_layer_wise_distributed_optimizer": True},
    ),
}


def _train(case: Case, steps: int) -> list[float | None]:
    initialize_megatron(**case.layout)
    chunks = case.layout.get("virtual_pp") or 1
    stages = range(chunks) if chunks > 1 else [None]
    models = [wrap_ddp(tiny_gpt(virtual_stage=s, **case.model), **case.ddp) for s in stages]
    dtype = case.model.get("dtype", torch.float32)
    fields = {
        "optimizer": "adam",
        "lr": 1e-2,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        # small enough for the first step to be taken; the loss scale is tested on its own
        "initial_loss_scale": 2.0**10,
        "use_distributed_optimizer": case.ddp.get("use_distributed_optimizer", False),
        "overlap_param_gather": case.ddp.get("overlap_param_gather", False),
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**(fields | case.optimizer)), models)
    rank = parallel_state.get_data_parallel_rank()
    batches = [synthetic_batch(2 * rank + i) for i in range(2)]
    return [train_step(models, optimizer, batches) for _ in range(steps)]


@pytest.mark.parametrize("name", CASES)
def test_gpt_trains(name: str) -> None:
    case = CASES[name]
    for losses in run_ranks(case.ranks, _train, case, 4):
        if losses[0] is not None:
            assert losses[-1] < 0.9 * losses[0]
