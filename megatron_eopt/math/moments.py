"""Second moments of orthogonalized updates: AdaMuon, NorMuon and NAMO.

All of them act on the orthogonal factor, before it is scaled by the matrix's shape. Their
statistics start at zero. With bias correction they are divided by ``1 - beta2^step`` as in Adam
(arXiv:1412.6980); without it, the first updates of AdaMuon and NAMO are ``1 / sqrt(1 - beta2)``
times as large. NorMuon restores the update's norm, so the correction matters only near ``eps``.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.linalg import vector_norm

from megatron_eopt.math.newton_schulz import ReduceT

Moment2MethodT = Literal["adamuon", "normuon", "namo"]
"""``adamuon`` (arXiv:2507.11005) divides each entry by the root of its second moment. ``normuon``
(arXiv:2510.05491) divides each row (of a wide matrix: each column) by its root mean square and
restores the Frobenius norm. ``namo`` (arXiv:2602.17080) multiplies the matrix by the norm of the
direction over the running norm of the gradient."""

MOMENT2_METHODS: tuple[Moment2MethodT, ...] = get_args(Moment2MethodT)


def statistic_shape(
    method: Moment2MethodT, rows: int, cols: int, *, transposed: bool = False
) -> tuple[int, ...]:
    """Return the shape of the running statistic of one ``(rows, cols)`` matrix.

    ``transposed`` says that its rows are inputs.
    """
    match method:
        case "adamuon":
            return (rows, cols)
        case "normuon":
            is_by_row = rows > cols or (rows == cols and not transposed)
            return (rows, 1) if is_by_row else (1, cols)
        case "namo":
            return (1,)


def correction(beta2: float, step: float, bias_correction: bool) -> float:
    """Return the divisor of a statistic after ``step`` updates."""
    return 1 - beta2**step if bias_correction else 1.0


def adamuon_(
    updates: list[Tensor], moments: list[Tensor], beta2: float, eps: float, divisors: list[float]
) -> None:
    """Divide each entry by the root of its running mean square plus ``eps``, in place.

    ``updates`` are orthogonal factors or any parts of them. ``moments``, the running mean squares,
    have the same shapes and dtypes. Each has one divisor, see :func:`correction`.
    """
    if not updates:
        return
    torch._foreach_mul_(moments, beta2)
    torch._foreach_addcmul_(moments, updates, updates, value=1 - beta2)
    roots = torch._foreach_sqrt(moments)
    # of the roots, because the moments are state and stay uncorrected
    if any(divisor != 1 for divisor in divisors):
        torch._foreach_div_(roots, [divisor**0.5 for divisor in divisors])
    torch._foreach_add_(roots, eps)
    torch._foreach_div_(updates, roots)


def normuon_(
    update: Tensor,  # ``(batch, rows, cols)``, orthogonal
    moment2: Tensor,  # ``(batch, *statistic_shape)``
    beta2: float,  # decay of the running mean
    eps: float,  # smallest mean square and smallest norm
    divisor: float | Tensor,  # one, or one per matrix; see :func:`correction`
    *,
    shape: tuple[int, int],  # of the whole matrix
    reduce: ReduceT | None = None,  # sums over the ranks that share the matrix
) -> None:
    """Divide each slice along the long side by its running root mean square, in place.

    Both Frobenius norms follow from the slices' sums of squares, so the update is read once and
    written once. Both tensors may be this rank's part of matrices cut along the long side (of a
    square matrix: the columns).
    """
    along = -1 if shape[0] >= shape[1] else -2
    square_sums = vector_norm(update, dim=along, keepdim=True).square_()
    # A square matrix, cut by columns: each rank has a part of every row. Once rows are summed,
    # every rank has all of them, and norms need no sum of their own. Otherwise ranks have whole
    # slices, and only the norms are sums over ranks.
    if reduce is not None and update.size(along) < shape[along]:
        square_sums, reduce = reduce(square_sums), None
    moment2.lerp_(square_sums / shape[along], 1 - beta2)
    step_sizes = moment2.div(divisor).clamp_(min=eps).rsqrt_()
    # both in one tensor: one all-reduce
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
    """Update the running squared gradient norms in place and return the factor for each update.

    All tensors have shape ``(matrices,)``; the norms are Frobenius norms, of gradients and of
    directions to orthogonalize. Factor: ``|direction| / (sqrt(moment2 / divisor) + eps)``.
    """
    moment2.lerp_(grad_norm_squared, 1 - beta2)
    return direction_norm_squared.sqrt() / moment2.div(divisor).sqrt_().add_(eps)


def _total(square_sums: Tensor) -> Tensor:
    # in float64, so that float32 results do not depend on how ranks are cut
    return square_sums.sum(dim=(-2, -1), keepdim=True, dtype=torch.float64)
