"""One loss scale, and one decision a step, for all buffers of an optimizer."""

from typing import Any

import torch
from torch import Tensor, distributed

from megatron_eopt.base.upstream import needed
from megatron_eopt.settings.settings import LossScale


def make_scaler(wanted: LossScale | None) -> Any:
    """Return megatron-core's gradient scaler, constant or dynamic; None without."""
    if wanted is None:
        return None
    if wanted.constant is not None:
        return needed("ConstantGradScaler")(wanted.constant)
    return needed("DynamicGradScaler")(**wanted.dynamic)


def unscale_(grads: list[Tensor], inv_scale: Tensor, group: Any) -> bool:
    """Multiply float32 gradients by ``inv_scale``, of shape (1,), in place; collective.

    Returns:
        Whether any rank of ``group`` had infinities or nans among them.
    """
    found = torch.zeros_like(inv_scale)
    if grads:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv_scale)
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=group)
    return bool(found.item() > 0)
