"""One loss scale, and one decision a step, for all buffers of an optimizer."""

from collections.abc import Sequence
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


class UnscaledOnce:
    """Remembers that gradients have been unscaled, so that asking for it twice does it once.

    Some callers prepare gradients and look at their norm before they step, which prepares them
    again. Float32 gradients are unscaled where the model keeps them. Torch counts the writes to a
    tensor, and Megatron zeroes its buffers before each step, so new gradients are told from those
    that were seen. Gradients outside of DDP's buffers are always new.
    """

    def __init__(self, model_chunks: Sequence[Any]) -> None:
        self._chunks = [chunk for chunk in model_chunks if hasattr(chunk, "bucket_groups")]
        self._knows_all = len(self._chunks) == len(model_chunks) > 0
        self._seen: list[int] | None = None
        self._found_inf = False

    def recall(self) -> bool | None:
        """Return whether these gradients overflowed; None if they have not been unscaled."""
        return self._found_inf if self._seen == self._writes() else None

    def remember(self, found_inf: bool) -> None:
        """Take note that the gradients have just been unscaled, and whether any overflowed."""
        self._seen = self._writes() if self._knows_all else None
        self._found_inf = found_inf

    def forget(self) -> None:
        """Unscale next time, whatever has happened to the buffers."""
        self._seen = None

    def _writes(self) -> list[int]:
        return [
            buffer.grad_data._version
            for chunk in self._chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
