"""The parts of a Muon step that act on each number by itself, fused over lists of tensors.

They do not care how a matrix is stored: whole weights, tensor-parallel slabs and flat fragments all
take the same calls.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["WEIGHT_DECAY_METHODS", "WeightDecayT", "apply_updates_", "decay", "directions"]

WeightDecayT = Literal["decoupled", "l2", "independent"]
"""How weight decay acts: ``decoupled`` shrinks weights by ``lr * weight_decay`` (AdamW,
arXiv:1711.05101), ``independent`` by ``weight_decay`` whatever the learning rate, ``l2`` adds
``weight_decay * weight`` to the gradient."""

WEIGHT_DECAY_METHODS: tuple[WeightDecayT, ...] = get_args(WeightDecayT)


def decay(
    params: list[Tensor],
    grads: list[Tensor],
    lr: float,
    weight_decay: float,
    method: WeightDecayT,
) -> list[Tensor]:
    """Decay weights in place, or gradients into new tensors, and return the gradients to use.

    Args:
        params: Weights or fragments of them.
        grads: Gradients of the same shapes; never changed.
        lr: Learning rate.
        weight_decay: Weight decay.
        method: One of :data:`WeightDecayT`.
    """
    if not weight_decay or not params:
        return grads
    if method == "l2":
        return list(torch._foreach_add(grads, params, alpha=weight_decay))
    # p - rate * p instead of (1 - rate) * p: rounds as emerging-optimizers does
    rate = weight_decay * (lr if method == "decoupled" else 1.0)
    torch._foreach_add_(params, params, alpha=-rate)
    return grads


def directions(
    grads: list[Tensor], momenta: list[Tensor], momentum: float, nesterov: bool
) -> list[Tensor]:
    """Update the momenta in place and return what to orthogonalize.

    Momentum is the moving average ``M <- momentum M + (1 - momentum) G``; Nesterov's direction
    mixes the gradient in once more, ``momentum M + (1 - momentum) G``.

    Args:
        grads: Gradients.
        momenta: Momentum buffers of the same shapes.
        momentum: Decay of the average, in [0, 1).
        nesterov: Which of the two directions to return.

    Returns:
        The momenta themselves, which the caller must not change, or new tensors.
    """
    if not grads:
        return []
    torch._foreach_lerp_(momenta, grads, 1 - momentum)
    return list(torch._foreach_lerp(grads, momenta, momentum)) if nesterov else momenta


def apply_updates_(params: list[Tensor], updates: list[Tensor], lr: float) -> None:
    """Subtract ``lr`` times the updates from the parameters, in place."""
    if params:
        torch._foreach_add_(params, updates, alpha=-lr)
