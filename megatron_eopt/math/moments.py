"""Second moments of orthogonalized updates: AdaMuon, NorMuon and NAMO.

All act on a batch of whole logical matrices ``(batch, rows, cols)`` before the shape's scale factor
is applied, so the factor is applied once. Statistics start at zero; with ``bias_correction`` they
are divided by ``1 - beta2^step`` as Adam does (arXiv:1412.6980), without it the first steps of
AdaMuon and NAMO are ``1 / sqrt(1 - beta2)`` times as long.
"""

from typing import Literal, get_args

from torch import Tensor
from torch.linalg import vector_norm

from megatron_eopt.math.newton_schulz import ReduceT

Moment2MethodT = Literal["adamuon", "normuon", "namo"]
"""``adamuon`` (arXiv:2507.11005): every entry by its own second moment. ``normuon``
(arXiv:2510.05491): every row (of a wide matrix: every column) by its mean square, the Frobenius
norm kept. ``namo`` (arXiv:2602.17080): the whole matrix by the direction's norm over the running
norm of the gradient."""

MOMENT2_METHODS: tuple[Moment2MethodT, ...] = get_args(Moment2MethodT)


def statistic_shape(method: Moment2MethodT, rows: int, cols: int) -> tuple[int, ...]:
    """Return the shape of one matrix's running statistic."""
    match method:
        case "adamuon":
            return (rows, cols)
        case "normuon":
            return (rows, 1) if rows >= cols else (1, cols)
        case "namo":
            return (1, 1)


def correction(beta2: float, step: int, bias_correction: bool) -> float:
    """Return what to divide a statistic by after ``step`` updates."""
    return 1 - beta2**step if bias_correction else 1.0


def adamuon_(update: Tensor, moment2: Tensor, beta2: float, eps: float, divisor: float) -> None:
    """Divide each entry by the root of its running mean square; all in place.

    Element-wise, so ``update`` and ``moment2`` may be pieces of any shape.
    """
    moment2.lerp_(update.square(), 1 - beta2)
    update.div_(moment2.div(divisor).sqrt_().add_(eps))


def normuon_(
    update: Tensor,
    moment2: Tensor,
    beta2: float,
    eps: float,
    divisor: float,
    reduce: ReduceT | None = None,
) -> None:
    """Divide the slices along the long side by their running root mean square; all in place.

    Args:
        update: Orthogonal matrices ``(batch, rows, cols)``, or slabs cut along the long side.
        moment2: ``(batch, *statistic_shape)``, or the slab's part of it.
        beta2: Decay of the running mean.
        eps: Smallest mean square and smallest norm.
        divisor: See :func:`correction`.
        reduce: Sums squared norms over the ranks that share the long side.
    """
    along = -1 if moment2.size(-1) == 1 else -2
    before = _square_norm(update, reduce)
    moment2.lerp_(update.square().mean(dim=along, keepdim=True), 1 - beta2)
    update.mul_(moment2.div(divisor).clamp_(min=eps).rsqrt_())
    after = _square_norm(update, reduce)
    update.mul_((before.sqrt() / after.sqrt_().clamp_(min=eps)))


def namo_(
    update: Tensor,
    moment2: Tensor,
    grad_square_norm: Tensor,
    direction_norm: Tensor,
    beta2: float,
    eps: float,
    divisor: float,
) -> None:
    """Scale each matrix by its direction's norm over the running norm of its gradient, in place.

    Args:
        update: Orthogonal matrices ``(batch, rows, cols)``.
        moment2: Running squared gradient norms ``(batch, 1, 1)``.
        grad_square_norm: Squared Frobenius norms of the gradients, ``(batch, 1, 1)``.
        direction_norm: Frobenius norms of what was orthogonalized, ``(batch, 1, 1)``.
        beta2: Decay of the running mean.
        eps: Added to the running norm.
        divisor: See :func:`correction`.
    """
    moment2.lerp_(grad_square_norm, 1 - beta2)
    update.mul_(direction_norm / moment2.div(divisor).sqrt_().add_(eps))


def _square_norm(update: Tensor, reduce: ReduceT | None) -> Tensor:
    squared = vector_norm(update, dim=(-2, -1), keepdim=True).square_()
    return squared if reduce is None else reduce(squared)
