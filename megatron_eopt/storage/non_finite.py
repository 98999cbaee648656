"""Refuses gradients that are not finite: on all ranks alike, before anything has changed.

The gradient norm tells. Every step computes it, all ranks get the same number, and it is finite
only if all entries are. Parameters that megatron-core leaves out of it (copies that other ranks
count, groups with a norm of their own) are brought in without changing its value. So a good step
takes no further collective; names travel only when the step cannot go on.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from megatron_eopt.base.versions import megatron_name
from megatron_eopt.math.finite import NonFiniteError, names_of_all, not_finite
from megatron_eopt.storage.main_copies import main_copies

__all__ = ["FiniteNormChain", "WatchedGradients", "mark_left_out"]

_HUGE = 1e16
"""Of norms up to this one it takes a million until float32 has no room for their squares' sum."""


class WatchedGradients:
    """Brings every gradient of a wrapper into the norm; stands before megatron-core's class."""

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[Tensor]:
        """Return the gradients whose norm is that of megatron-core's choice of them.

        Args:
            grad_norm_group: Name of a group with a norm of its own; None for the main norm, which
                is not finite if any gradient of this wrapper is not.
        """
        counted: list[Tensor] = super().get_grads_for_grad_norm(grad_norm_group)  # type: ignore[misc]
        if grad_norm_group is not None:
            return counted
        known = {id(grad) for grad in counted}
        return mark_left_out(
            counted, [grad for _, grad in _gradients(self) if id(grad) not in known]
        )


class FiniteNormChain(ChainedOptimizer):
    """A chain whose step ends with an error, on all ranks, if the gradient norm is not finite.

    Its members must be :class:`WatchedGradients`.

    Attributes:
        watched_chunks: The model's chunks, which name the parameters.
    """

    watched_chunks: Sequence[Any] = ()

    @torch.no_grad()
    def get_grad_norm(self) -> Any:
        """Return the norm over all ranks; collective.

        Raises:
            NonFiniteError: If it is inf or nan, unless the configuration skips steps with such a
                norm. The names are the same on every rank.
        """
        norm = super().get_grad_norm()
        if not math.isfinite(norm) and not self.is_above_skip_threshold(norm):
            self._refuse()
        return norm

    def is_above_skip_threshold(self, norm: float) -> bool:
        """Return whether the configuration skips steps with this gradient norm; never with nan."""
        threshold = self.config.grad_norm_skip_threshold
        return math.isfinite(threshold) and norm > threshold

    def _refuse(self) -> None:
        named = [
            (self._name_of(param), grad)
            for child in self.chained_optimizers
            for param, grad in _gradients(child)
        ]
        children = self.chained_optimizers
        groups = dict.fromkeys(child.get_grad_stats_parallel_group() for child in children)
        if names := names_of_all(not_finite(named), groups):
            raise NonFiniteError("gradients", names)
        huge = [name for name, grad in named if float(grad.double().norm()) > _HUGE]
        raise NonFiniteError(
            "norm of all gradients, each of them finite, because", names_of_all(huge, groups)
        )

    def _name_of(self, param: Tensor) -> str:
        name: str = megatron_name("get_global_unique_param_name")(self.watched_chunks, param)
        while name.startswith("module."):
            name = name.removeprefix("module.")
        return name


def mark_left_out(counted: list[Tensor], left_out: list[Tensor]) -> list[Tensor]:
    """Return tensors with the norm of ``counted``, or with norm nan if that of the others is not.

    The host waits for nothing, and the norm keeps every bit: the smallest tensor is replaced by its
    sum with zero, or with nan.

    Args:
        counted: Gradients that count in the norm.
        left_out: Gradients that do not.
    """
    left_out = [grad for grad in left_out if grad.numel()]
    if not left_out:
        return counted
    norms = [norm.to(torch.float32) for norm in torch._foreach_norm(left_out)]
    zero_or_nan = torch.stack(norms).sum() * 0
    filled = [number for number, grad in enumerate(counted) if grad.numel()]
    if not filled:
        return [*counted, zero_or_nan.view(1)]
    smallest = min(filled, key=lambda number: counted[number].numel())
    marked = list(counted)
    marked[smallest] = counted[smallest] + zero_or_nan.to(counted[smallest].dtype)
    return marked


def _gradients(wrapper: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's parameters with the gradients that their main copies step with."""
    model_of = {main: model for model, main in main_copies(wrapper)}
    decoupled = wrapper.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    for main in wrapper.get_parameters():
        grad = getattr(main, "decoupled_grad" if decoupled else "grad", None)
        if grad is not None:
            yield model_of.get(main, main), grad
