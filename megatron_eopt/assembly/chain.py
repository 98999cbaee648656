"""Several optimizers that step as one."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer


class SharedGradScaler:
    """One loss scale for several optimizers, updated once a step.

    Each of them reports whether its gradients overflowed; the scale changes only when all have,
    since they must skip a step, and shrink the scale, together or not at all.

    Args:
        scaler: megatron-core's scaler that does the arithmetic.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    @property
    def scale(self) -> torch.Tensor:
        """The factor on the loss, of shape (1,)."""
        scale: torch.Tensor = self._scaler.scale
        return scale

    @property
    def inv_scale(self) -> torch.Tensor:
        """Its reciprocal, of shape (1,)."""
        inverse: torch.Tensor = self._scaler.inv_scale
        return inverse

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        state: dict[str, Any] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what a checkpoint kept; every optimizer of the chain brings the same."""
        self._scaler.load_state_dict(state_dict)

    def update(self, found_inf: bool) -> None:
        """Do nothing yet: the chain calls :meth:`settle` when every optimizer has reported."""

    def settle(self, found_inf: bool) -> None:
        """Update the scale for this step.

        Args:
            found_inf: Whether any optimizer's gradients overflowed.
        """
        self._scaler.update(found_inf)


class OneScaleChain(ChainedOptimizer):
    """megatron-core's chain, with one loss scale over all its optimizers.

    Args:
        optimizers: The optimizers, in the order in which they step and are saved.
        scaler: The scaler they share; None without loss scaling.
    """

    def __init__(
        self, optimizers: Sequence[MegatronOptimizer], scaler: SharedGradScaler | None = None
    ) -> None:
        super().__init__(list(optimizers))
        self._scaler = scaler

    def prepare_grads(self) -> bool:
        """Copy and unscale all gradients; return whether any overflowed."""
        found_inf = bool(super().prepare_grads())
        if self._scaler is not None:
            self._scaler.settle(found_inf)
        return found_inf


def exempt_from_clipping(optimizers: Iterable[MegatronOptimizer]) -> None:
    """Let the chain not scale these optimizers' gradients; they still count in the norm.

    Call it when the chain exists, which insists on equal configurations while it is made.
    """
    for optimizer in optimizers:
        optimizer.config = copy.copy(optimizer.config)
        optimizer.config.clip_grad = 0.0
