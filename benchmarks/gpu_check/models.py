"""A small GPT with its optimizer, and gradients for it."""

from typing import Any

import torch

from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from tests.harness.megatron import initialize_megatron
from tests.harness.models import Batch, synthetic_batch, tiny_gpt, wrap_ddp


def build(
    model: dict[str, Any],
    config: dict[str, Any],
    parallel: dict[str, int] | None = None,
) -> tuple[Any, Any]:
    """Return a wrapped model on this rank's device, and its optimizer.

    Args:
        model: Arguments of ``tiny_gpt``.
        config: Fields of ``EmergingOptimizerConfig``.
        parallel: Arguments of ``initialize_megatron``.
    """
    initialize_megatron(**(parallel or {}))
    fields = {
        "optimizer": "muon",
        "lr": 0.02,
        "min_lr": 0.02,
        "bf16": model.get("dtype") == torch.bfloat16,
        "use_distributed_optimizer": True,
    } | config
    chunk = wrap_ddp(
        tiny_gpt(masked_softmax_fusion=False, **model),
        use_distributed_optimizer=fields["use_distributed_optimizer"],
    )
    optimizer = get_megatron_optimizer(EmergingOptimizerConfig(**fields), [chunk])
    for group in optimizer.param_groups:
        # a scheduler's work
        group["lr"] = fields["lr"]
        group["weight_decay"] = fields.get("weight_decay", 0.01) * group["wd_mult"]
    return chunk, optimizer


def batch_of(seed: int) -> Batch:
    """Return a batch on the device."""
    batch = synthetic_batch(seed)
    return Batch(batch.tokens.cuda(), batch.labels.cuda(), batch.positions.cuda())


def give_gradients(chunk: Any, seed: int) -> None:
    """Set random gradients, of the size that they have in training."""
    torch.manual_seed(seed)
    for param in chunk.parameters():
        param.main_grad.normal_(std=1e-2)
