"""One loss scale, and one decision a step, for all buffers of an optimizer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from megatron_eopt.base.versions import megatron_name

__all__ = ["make_scaler", "overflowed", "unscale_"]


def make_scaler(config: Any) -> Any:
    """Return the gradient scaler that ``config`` asks for: constant, dynamic (fp16) or none."""
    if config.loss_scale:
        return megatron_name("ConstantGradScaler")(config.loss_scale)
    if not config.fp16:
        return None
    return megatron_name("DynamicGradScaler")(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def unscale_(grads: Sequence[Tensor | None], inv_scale: Tensor) -> Tensor:
    """Multiply gradients by ``inv_scale`` in place and look for infinities and nans among them.

    Args:
        grads: float32 gradients.
        inv_scale: Reciprocal of the loss scale, of shape (1,).

    Returns:
        float32 of shape (1,): 1 if any was not finite, else 0.
    """
    found = torch.zeros_like(inv_scale)
    present = [grad for grad in grads if grad is not None]
    if present:
        torch._amp_foreach_non_finite_check_and_unscale_(present, found, inv_scale)
    return found


def overflowed(found: Tensor, group: Any) -> bool:
    """Return whether any rank of ``group`` found something that is not finite."""
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=group)
    return bool(found.item() > 0)
