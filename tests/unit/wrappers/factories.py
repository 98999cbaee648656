"""Runs that compare our factory with megatron-core's."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

import megatron_eopt
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp

FACTORIES: dict[str, Callable[..., Any]] = {
    "stock": megatron_optimizer.get_megatron_optimizer,
    "ours": megatron_eopt.get_megatron_optimizer,
}


def losses(
    factory: str,
    steps: int,
    *,
    config: dict[str, Any],
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    overrides: Any = None,
) -> list[float]:
    """Train a tiny GPT; return the loss of every step."""
    if not parallel_state.model_parallel_is_initialized():
        initialize_megatron(**(parallel or {}))
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    model = {**(model or {})}
    model["dtype"] = getattr(torch, model.get("dtype", "float32"))
    chunk = wrap_ddp(tiny_gpt(**model), **(ddp or {}))
    fields = {
        "muon_fp32_matmul_prec": "highest",
        "lr": 0.01,
        "min_lr": 0.001,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
    } | config
    optimizer = FACTORIES[factory](
        OptimizerConfig(**fields), [chunk], overrides, use_gloo_process_groups=False
    )
    for group in optimizer.param_groups:
        group["lr"] = group["max_lr"]
    rank = parallel_state.get_data_parallel_rank()
    batches = ([synthetic_batch(1000 * rank + step)] for step in range(steps))
    found = [train_step([chunk], optimizer, batch) for batch in batches]
    return [loss for loss in found if loss is not None]


def both(steps: int, kwargs: dict[str, Any]) -> dict[str, list[float]]:
    """Return the losses of both; ``stock_config`` is what megatron-core needs other values of."""
    theirs = {**kwargs["config"], **kwargs.get("stock_config", {})}
    common = {key: value for key, value in kwargs.items() if "config" not in key}
    return {
        "stock": losses("stock", steps, config=theirs, **common),
        "ours": losses("ours", steps, config=kwargs["config"], **common),
    }
