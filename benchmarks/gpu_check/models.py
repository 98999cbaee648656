"""Build a small GPT with its optimizer, and set its gradients."""

from typing import Any

import torch

from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from tests.harness.megatron import initialize_megatron
from tests.harness.models import Batch, synthetic_batch, tiny_gpt, wrap_ddp

LARGE: dict[str, Any] = {
    "layers": 8,
    "hidden": 2048,
    "heads": 16,
    "query_groups": 8,
    "vocabulary": 32768,
    "position_embedding": "rope",
    "dtype": torch.bfloat16,
}
"""Size of a model with half a billion parameters."""


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
    fields = {"use_distributed_optimizer": True} | config
    chunk = wrap_ddp(gpt(model), use_distributed_optimizer=fields["use_distributed_optimizer"])
    made = EmergingOptimizerConfig(**settings(model, **{"optimizer": "muon"} | fields))
    return chunk, with_rates(get_megatron_optimizer(made, [chunk]))


def gpt(model: dict[str, Any]) -> torch.nn.Module:
    """Return a small GPT that needs no kernels of other packages.

    Args:
        model: Arguments of ``tiny_gpt``.
    """
    return tiny_gpt(masked_softmax_fusion=False, **model)


def settings(model: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return configuration fields for a model's optimizer; ``fields`` override them."""
    dtype = model.get("dtype", torch.float32)
    rates = {"lr": 0.02, "min_lr": 0.02}
    # as megatron-core's Muon, with which steps are compared
    rates |= {"muon_scale_mode": "spectral", "muon_nesterov": False}
    return rates | {"bf16": dtype == torch.bfloat16, "params_dtype": dtype} | fields


def with_rates(optimizer: Any) -> Any:
    """Set the learning rates and weight decays that a scheduler would set; return the optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = optimizer.config.lr
        group["weight_decay"] = optimizer.config.weight_decay * group["wd_mult"]
    return optimizer


def batch_of(seed: int) -> Batch:
    """Return a batch on the device."""
    batch = synthetic_batch(seed)
    return Batch(batch.tokens.cuda(), batch.labels.cuda(), batch.positions.cuda())


def give_gradients(chunk: Any, seed: int) -> None:
    """Set random gradients of a realistic size."""
    torch.manual_seed(seed)
    for param in chunk.parameters():
        param.main_grad.normal_(std=1e-2)
