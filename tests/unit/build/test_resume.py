"""Parameter groups keep their identity over a resume, also with another learning rate."""

import copy
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, ParamKey
from megatron.core.optimizer import get_megatron_optimizer as megatrons

from megatron_eopt import get_megatron_optimizer
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp
from tests.harness.scene import forget_megatron


def _build(factory: Any, lr: float, dtype: torch.dtype, optimizer: str) -> tuple[Any, Any]:
    torch.manual_seed(1)
    chunk = wrap_ddp(tiny_gpt(layers=1, dtype=dtype))
    config = OptimizerConfig(
        optimizer=optimizer,
        lr=lr,
        min_lr=lr / 10,
        bf16=dtype == torch.bfloat16,
        decoupled_lr=2 * lr,
    )
    overrides = {
        ParamKey(name="*.bias"): {"wd_mult": 0.0},
        ParamKey(attr="is_embedding_or_output_parameter"): {"max_lr": 2 * lr},
    }
    return chunk, factory(config, [chunk], overrides)


def _resume(dtype: torch.dtype, optimizer: str, by_megatron: bool) -> None:
    forget_megatron()
    initialize_megatron()
    first = megatrons if by_megatron else get_megatron_optimizer
    chunk, saved = _build(first, 0.01, dtype, optimizer)
    for group in saved.param_groups:
        group["lr"] = group["max_lr"]
    train_step([chunk], saved, [synthetic_batch(0)])
    state = copy.deepcopy(saved.state_dict())
    new_lr = 0.01 if by_megatron else 0.05

    _, resumed = _build(get_megatron_optimizer, new_lr, dtype, optimizer)
    before = copy.deepcopy(state)
    resumed.load_state_dict(state)
    assert str(state) == str(before)
    max_lrs = {group["max_lr"] for group in resumed.param_groups}
    assert max_lrs == {new_lr, 2 * new_lr}
    assert {group["lr"] for group in resumed.param_groups} == {0.01, 0.02}


def _resumed() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for optimizer in ("adam", "muon"):
            _resume(dtype, optimizer, False)
    _resume(torch.float32, "adam", True)


def test_resume_with_another_learning_rate():
    run_ranks(1, _resumed)
