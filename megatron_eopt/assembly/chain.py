"""Several optimizers that step as one."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_eopt.assembly.plain.checkpoint import PlainCheckpoint
from megatron_eopt.assembly.plain.groups import children_of
from megatron_eopt.storage.checkpoint.saved_groups import check_structure, parts_of
from megatron_eopt.storage.fragment_optimizer import FragmentOptimizer
from megatron_eopt.storage.loss_scale import UnscaledOnce
from megatron_eopt.storage.non_finite import FiniteNormChain


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


class OneScaleChain(FiniteNormChain):
    """megatron-core's chain, with one loss scale over all its optimizers and finite gradients.

    Args:
        optimizers: The optimizers, in the order in which they step and are saved.
        scaler: The scaler they share; None without loss scaling.
        model_chunks: The whole model, which names the parameters in messages.
    """

    def __init__(
        self,
        optimizers: Sequence[MegatronOptimizer],
        scaler: SharedGradScaler | None = None,
        model_chunks: Sequence[Any] = (),
    ) -> None:
        super().__init__(list(optimizers))
        self._scaler = scaler
        self.watched_chunks = model_chunks
        self._unscaled = UnscaledOnce(model_chunks)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what :meth:`state_dict` or ``dist_checkpointing`` returned.

        Raises:
            ConfigurationError: If it is not of these optimizers, or lacks state of theirs.
            ConfigurationTypeError: If it is not built like a state.
        """
        check_structure(state_dict)
        if all(isinstance(child, PlainCheckpoint) for child in self.chained_optimizers):
            state_dict = children_of(state_dict, self.chained_optimizers)
        elif all(isinstance(child, FragmentOptimizer) for child in self.chained_optimizers):
            parts = parts_of(state_dict, len(self.chained_optimizers))
            state_dict = parts[0] if len(parts) == 1 else dict(enumerate(parts))
        super().load_state_dict(state_dict)

    def prepare_grads(self) -> bool:
        """Copy and unscale all gradients, at most once; return whether any overflowed."""
        if self._scaler is None:
            return bool(super().prepare_grads())
        found_inf = self._unscaled.recall()
        if found_inf is None:
            found_inf = bool(super().prepare_grads())
            self._scaler.settle(found_inf)
            self._unscaled.remember(found_inf)
        return found_inf

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the main parameters' gradients."""
        self._unscaled.forget()
        super().zero_grad(set_to_none)

    def step_with_ready_grads(self) -> bool:
        """Step all optimizers; return whether they did."""
        self._unscaled.forget()
        return bool(super().step_with_ready_grads())


def exempt_from_clipping(optimizers: Iterable[MegatronOptimizer]) -> None:
    """Let the chain not scale these optimizers' gradients; they still count in the norm.

    Call it when the chain exists, which insists on equal configurations while it is made.
    """
    for optimizer in optimizers:
        optimizer.config = copy.copy(optimizer.config)
        optimizer.config.clip_grad = 0.0
