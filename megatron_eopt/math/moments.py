"""Second moments of orthogonalized updates: AdaMuon, NorMuon and NAMO.

All act on orthogonal factors before the shape's scale factor is applied, so the factor is applied
once. Statistics start at zero; with bias correction they are divided by ``1 - beta2^step`` as Adam
does (arXiv:1412.6980), without it the first steps of AdaMuon and NAMO are ``1 / sqrt(1 - beta2)``
times as long. NorMuon keeps the update's norm, so the correction matters to it only near ``eps``.
"""

from typing import Literal, get_args

import torch
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
            return (1,)


def correction(beta2: float, step: float, bias_correction: bool) -> float:
    """Return what to divide a statistic by after ``step`` updates."""
    return 1 - beta2**step if bias_correction else 1.0


def adamuon_(
    updates: list[Tensor], moments: list[Tensor], beta2: float, eps: float, divisors: list[float]
) -> None:
    """Divide each entry by the root of its running mean square plus ``eps``; all in place.

    Element-wise: ``updates`` may be any pieces of orthogonal factors, with running mean squares
    ``moments`` of the same shapes and dtypes and one divisor each, see :func:`correction`.
    """
    if not updates:
        return
    torch._foreach_mul_(moments, beta2)
    torch._foreach_addcmul_(moments, updates, updates, value=1 - beta2)
    roots = torch._foreach_sqrt(moments)
    if any(divisor != 1 for divisor in divisors):
        torch._foreach_div_(roots, [divisor**0.5 for divisor in divisors])
    torch._foreach_add_(roots, eps)
    torch._foreach_div_(updates, roots)


def normuon_(
    update: Tensor,  # ``(batch, rows, cols)``, orthogonal
    moment2: Tensor,  # ``(batch, *statistic_shape)``
    beta2: float,  # decay of the running mean
    eps: float,  # smallest mean square and smallest norm
    divisor: float | Tensor,  # see :func:`correction`; may be one for each matrix
    *,
    shape: tuple[int, int],  # of the whole matrix
    reduce: ReduceT | None = None,  # sums over the ranks that share the matrix
) -> None:
    """Divide the slices along the long side by their running root mean square; all in place.

    Both Frobenius norms follow from the slices' square sums, so the update is read once and
    written once. Both tensors may be slabs cut along the long side (along the columns of a square
    matrix).
    """
    along = -1 if shape[0] >= shape[1] else -2
    square_sums = vector_norm(update, dim=along, keepdim=True).square_()
    if reduce is not None and update.size(along) < shape[along]:
        square_sums, reduce = reduce(square_sums), None
    moment2.lerp_(square_sums / shape[along], 1 - beta2)
    step_sizes = moment2.div(divisor).clamp_(min=eps).rsqrt_()
    norms = torch.cat([_total(square_sums), _total(square_sums * step_sizes.square())], dim=-1)
    if reduce is not None:
        norms = reduce(norms)
    before, after = norms.sqrt_().to(update.dtype).chunk(2, dim=-1)
    update.mul_(step_sizes.mul_(before / after.clamp_(min=eps)))


def namo_(
    moment2: Tensor,
    grad_norm_squared: Tensor,
    direction_norm_squared: Tensor,
    beta2: float,
    eps: float,
    divisor: float | Tensor,
) -> Tensor:
    """Update the running squared gradient norms in place; return the factor on each update.

    All tensors are ``(matrices,)``; the norms are Frobenius norms, those of the directions are of
    what is orthogonalized. The factor is ``|direction| / (sqrt(moment2 / divisor) + eps)``.
    """
    moment2.lerp_(grad_norm_squared, 1 - beta2)
    return direction_norm_squared.sqrt() / moment2.div(divisor).sqrt_().add_(eps)


def _total(square_sums: Tensor) -> Tensor:
    return square_sums.sum(dim=(-2, -1), keepdim=True, dtype=torch.float64)
