"""What Muon does with each number, whatever matrix it is in: decay, momentum, and the update."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_eopt.optimizers.driver import ParamGroup

WeightDecayT = Literal["decoupled", "l2", "independent"]
"""How weight decay acts: ``decoupled`` shrinks weights by ``lr * weight_decay`` (AdamW,
arXiv:1711.05101), ``independent`` by ``weight_decay`` whatever the learning rate, ``l2`` adds
``weight_decay * weight`` to the gradient."""

WEIGHT_DECAY_METHODS: tuple[WeightDecayT, ...] = get_args(WeightDecayT)


def decay_rate(group: ParamGroup, method: WeightDecayT) -> float:
    """Return by how much of themselves a step shrinks weights; 0 with ``l2``."""
    if method == "l2":
        return 0.0
    return float(group["weight_decay"] * (group["lr"] if method == "decoupled" else 1.0))


def shrink(params: Sequence[Tensor], rate: float) -> None:
    """Shrink weights by this part of themselves, in place."""
    if rate and params:
        # p - rate * p instead of (1 - rate) * p: rounds as emerging-optimizers does
        torch._foreach_add_(list(params), list(params), alpha=-rate)


def gradients(params: list[Tensor], group: ParamGroup, method: WeightDecayT) -> list[Tensor]:
    """Return the gradients to use: with ``l2`` new ones, which the weights are added to."""
    grads: list[Tensor] = [param.grad for param in params]  # type: ignore[misc]
    if method != "l2" or not group["weight_decay"] or not params:
        return grads
    return list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))


def directions(
    grads: list[Tensor],
    momenta: list[Tensor],
    momentum: float,
    nesterov: bool,
    dtype: torch.dtype | None = None,
    places: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """Update the momenta in place and return what to orthogonalize.

    Momentum is the moving average ``M <- momentum M + (1 - momentum) G``; Nesterov's direction
    mixes the gradient in once more, ``momentum M + (1 - momentum) G``. What is returned lies at its
    place of ``places``, flat tensors, where it fits. Else it is new, or without Nesterov the
    momentum itself, which the caller must not change. What is written is rounded to ``dtype``, if
    that is narrower than the gradient's.
    """
    if grads:
        torch._foreach_lerp_(momenta, grads, 1 - momentum)
    found = []
    for grad, kept, place in zip(grads, momenta, places or [None] * len(grads), strict=True):
        narrower = dtype is not None and dtype.itemsize < grad.dtype.itemsize
        wanted = dtype if narrower else grad.dtype
        if place is not None and (place.dtype, place.numel()) == (wanted, grad.numel()):
            mixed = place.view(grad.shape)
        else:
            mixed = torch.empty_like(grad, dtype=wanted) if nesterov else kept
        if nesterov:
            torch.lerp(grad, kept, momentum, out=mixed)
        elif mixed is not kept:
            mixed.copy_(kept)
        found.append(mixed)
    return found


def subtract(
    group: ParamGroup, params: Sequence[Tensor], updates: Sequence[Tensor], rate: float = 0.0
) -> None:
    """Shrink weights by ``rate`` and subtract the learning rate times the updates, in place.

    Updates are rounded to the parameters' dtypes first.
    """
    shrink(params, rate)
    if params:
        # what is narrower is added as it is, in the same kernel
        added = [
            update if update.dtype.itemsize < param.dtype.itemsize else update.to(param.dtype)
            for param, update in zip(params, updates, strict=True)
        ]
        torch._foreach_add_(list(params), added, alpha=-group["lr"])
