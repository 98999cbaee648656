"""torch's Adam and AdamW, whose steps clip gradients and round weights in the same pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_eopt.math.passes import adam_
from megatron_eopt.optimizers.driver import loss_of
from megatron_eopt.storage.interface import handed_out


class _InOnePass(torch.optim.Adam):
    """Steps as torch's class does with ``fused=True``; see Note [Coefficients]."""

    coefficient: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one step."""
        loss = loss_of(closure)
        for group in self.param_groups:
            found: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *found)  # type: ignore[no-untyped-call]
            params, grads, firsts, seconds, largest, steps = found
            lists = (params, firsts, seconds, list(map(handed_out, params)), grads, steps)
            adam_(lists, largest, self.coefficient, group)
        return loss


class Adam(_InOnePass):
    """For weight decay by way of gradients."""


class AdamW(_InOnePass, torch.optim.AdamW):
    """For weights that decay themselves."""
