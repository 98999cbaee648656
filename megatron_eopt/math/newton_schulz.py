"""The Newton-Schulz iteration: the standard form, and the form on Gram matrices.

Shapes: a *wide* matrix is ``(m, n)`` or ``(batch, m, n)`` with ``m <= n``. Callers transpose tall
matrices, so that the Gram matrix is the small one. A matrix that is tall in memory is passed as
``(n, m)`` with ``tall=True``: the small matrices are symmetric, so only the side they multiply from
changes, and a transposed copy would cost more than a 16-bit product. If the long side is cut over
ranks, ``reduce`` sums a tensor over them; ``None`` means that this rank has all columns.

Note [Gram form]
    One step maps ``X`` to ``P X`` with ``P = a I + b A + c A^2`` and ``A = X X^T``. These matrices
    are polynomials of the first Gram matrix, so they are symmetric and commute, and the next Gram
    matrix is ``P A P``, computed without ``X``. Several steps accumulate ``Q = ... P_2 P_1``; then
    ``Q X`` is the only product with the long side. Rounding errors in ``A`` grow with the square of
    the amplification of singular values, so a *restart* applies ``Q`` early and forms ``A`` anew.

    ``a`` is added to the diagonal afterwards. So only the product for ``P`` has an addend, which
    libraries copy if it must be kept.

Note [Half products]
    Kernels of :mod:`megatron_eopt.math.products` compute one triangle of a symmetric matrix and
    mirror it. In exact arithmetic all small matrices are symmetric. Rounded polynomials do not
    quite commute, though, so mirroring a product of two of them is another rounding error. It is
    smallest if ``R = b A + c A^2`` is multiplied and ``a`` times the other factor is added in
    float32, since ``R`` has a small diagonal.

    Later steps correct an error of ``P`` only if the iterate and the next Gram matrix both have it.
    The Gram matrix comes from ``R``, whose diagonal is finer than that of a rounded ``P``.
    So the ``Q`` of two steps is ``(R_2 + a_2 I)(R_1 + a_1 I)`` with all terms added in float32.

    Mirroring ``Q`` made errors up to 1.6 times as large in segments after the first, on low rank,
    and up to 1.13 times in a first segment of ``polar_express``. So these are computed whole.

Note [Float16 range]
    With 16-bit precision the Gram form uses float16, which has three more mantissa bits than
    bfloat16 but a range that products of small numbers leave. So iterates are scaled
    (:func:`rescaled`), first by a power of two, then so that each step's ``a`` is a power of two.
    Singular values near zero make ``P`` nearly ``a I``, where a rounded ``a`` would be the same
    error in all of them; powers of two and their products in ``Q`` are exact. With kernels for
    half products, the standard form uses float16 too. Then ``a`` needs no addend as large as ``X``.

Note [Teams]
    Ranks that share a matrix can also divide the products of small matrices: each computes the same
    number of rows. A rank needs only its rows of a left operand, so only right operands of later
    products are gathered: polynomials, the next Gram matrices, and ``Q``.

Note [Widened products]
    Many CPUs multiply 16-bit matrices entry by entry. On these, operands are converted to float32.
    Products of two bfloat16 numbers are exact in float32, sums are float32 either way, and the
    result is rounded once, so only the order of summation differs from other processors.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megatron_eopt.math import norms, products
from megatron_eopt.math.algorithm import IterationPlan
from megatron_eopt.math.coefficients import Triple

ReduceT = Callable[[Tensor], Tensor]
"""Sums a contiguous tensor over the ranks that share a matrix; may work in place."""


@runtime_checkable
class TeamSum(Protocol):
    """Sums a tensor over ranks that also divide the rows of small matrices; see Note [Teams]."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks."""

    def rows(self, m: int) -> tuple[int, int]:
        """Return the range ``(start, stop)`` of ``m`` rows that this rank computes."""

    def gather(self, block: Tensor) -> Tensor:
        """Return the whole matrix ``(..., m, m)`` from all ranks' rows ``(..., m / ranks, m)``."""


# With a smaller ``eps``, float32 squares underflow before the clamp to ``eps`` takes effect.
_FLOAT32_SAFE_EPS = 1e-15


def multiply_add(
    left: Tensor,
    right: Tensor,
    add: Tensor | None = None,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``beta * add + alpha * left @ right`` for 2-D or 3-D operands, written to ``out``.

    Without ``add`` the first term is zero. See Note [Widened products].
    """
    if add is not None and products.serves(left):
        # libraries would copy the addend
        out = _result(left, right) if out is None else out
        return products.multiply(left, right, out, add, alpha=alpha, beta=beta)
    if is_widened(type(left), left.device.type, left.dtype):
        # a temporary, so the result can be written over it
        wide = None if add is None else add.float()
        total = multiply_add(left.float(), right.float(), wide, beta=beta, alpha=alpha, out=wide)
        return total.to(left.dtype) if out is None else out.copy_(total)
    if add is None:
        product = torch.matmul(left, right, out=out)
        return product if alpha == 1.0 else product.mul_(alpha)
    if left.ndim == 2:
        return torch.addmm(add, left, right, beta=beta, alpha=alpha, out=out)
    return torch.baddbmm(add, left, right, beta=beta, alpha=alpha, out=out)


def symmetric(
    left: Tensor,
    right: Tensor,
    add: Tensor | None = None,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
    diagonal: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return ``beta add + alpha left right + diagonal I``, which is known to be symmetric.

    Kernels compute half of it, where they serve the operands; see Note [Half products].
    """
    if not products.serves(left):
        out = multiply_add(left, right, add, beta=beta, alpha=alpha, out=out)
        if diagonal:
            out.diagonal(0, -2, -1).add_(diagonal)
        return out
    out = _result(left, right) if out is None else out
    numbers = {"alpha": alpha, "beta": beta, "diagonal": diagonal}
    return products.multiply(left, right, out, add, symmetric=True, **numbers)


def _result(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


@cache
def is_widened(cls: type[Tensor], device: str, dtype: torch.dtype) -> bool:
    """Return whether products are computed in float32: on CPUs without instructions for a dtype."""
    # tensor subclasses stand for a GPU's tensors in a dry run
    if cls is not Tensor or device != "cpu" or dtype.itemsize > 2:
        return False
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    # missing if torch was built without oneDNN
    supported: Callable[[], bool] = getattr(
        torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", lambda: False
    )
    return not supported()


def normalize(
    x: Tensor,
    eps: float,
    dtype: torch.dtype,
    reduce: ReduceT | None = None,
    *,
    norm: float = 1.0,
    out: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    """Divide each matrix by its Frobenius norm, or by ``eps`` if that is larger.

    Squares are summed in float32 by row, then in float64 (on a GPU: in float64 alone), because a
    single float32 sum over the millions of entries of a weight loses up to four digits. On a CPU, a
    row with a norm beyond 1.8e19 overflows and gives a zero update, except in float64. ``squares``
    ``(..., parts)`` are these sums, if they are known.

    Returns:
        A contiguous tensor of this ``dtype``, shaped like ``x``, ``(..., m, n)`` of any float
        dtype. Every spectral norm is at most ``norm``. It is ``out``, if given, which is
        contiguous, of this dtype, and may have exactly the memory of ``x``.
    """
    careful = x.dtype == torch.float64 or eps < _FLOAT32_SAFE_EPS
    if out is None:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if norms.serves(x):
        if squares is None:
            squares = norms.sums_of_squares(x)
        if reduce is not None:
            squares = reduce(squares.sum(-1, keepdim=True, dtype=torch.float64))
        norms.divide(x, squares, eps, norm, out)
        return out
    # Reducing the contiguous dimension first is faster.
    rows = torch.linalg.vector_norm(
        x if x.stride(-1) <= x.stride(-2) else x.mT,
        dim=-1,
        dtype=torch.float64 if careful else torch.float32,
    )
    total = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    # squares can be added over ranks, norms cannot
    if reduce is not None:
        total = reduce(total.square_()).sqrt_()
    factor = norm / total.clamp_(min=eps)
    # a float64 factor would make torch multiply all of `x` in float64
    if x.dtype != torch.float64:
        factor = factor.to(torch.float32)
    return torch.mul(x, factor[..., None, None], out=out)


LastT = Callable[[Tensor, Tensor], Tensor]
"""Multiplies a small matrix and the last iterate, in the order given."""


def iterate_standard(
    x: Tensor,
    triples: Sequence[Triple],
    reduce: ReduceT | None = None,
    *,
    tall: bool = False,
    spare: Tensor | None = None,
    last: LastT | None = None,
) -> Tensor:
    """Run ``X <- a X + (b A + c A^2) X`` with ``A = X X^T`` once per triple, and return ``X``.

    ``x`` is normalised and is overwritten. ``spare``, a buffer like ``x`` (by default new), holds
    every other iterate. ``last``, if given, computes the last product. Each step calls ``reduce``
    with the Gram matrix; a team also gathers once per step. It takes
    ``len(triples) * (4 n / m + 2) m^3`` FLOPs per matrix. With float16, ``a`` is on the diagonal of
    the small matrix, see Note [Float16 range].
    """
    team = reduce if isinstance(reduce, TeamSum) else None
    m = x.shape[-1] if tall else x.shape[-2]
    square, polynomial = x.new_empty((2, *x.shape[:-2], m, m))
    spare = torch.empty_like(x) if spare is None else spare
    on_diagonal = x.dtype == torch.float16
    for step, (a, b, c) in enumerate(triples):
        wide, diagonal = x.mT if tall else x, a if on_diagonal else 0.0
        # summed before the polynomial, which is not linear in it
        square = symmetric(wide, wide.mT, out=square)
        square = square if reduce is None else reduce(square)
        if team is None:
            numbers = {"beta": b, "alpha": c, "diagonal": diagonal}
            symmetric(square, square, square, out=polynomial, **numbers)
        else:
            mine = _rows_of(square, team)
            rows = multiply_add(mine, square, mine, beta=b, alpha=c)
            rows.diagonal(team.rows(m)[0], -2, -1).add_(diagonal)
            polynomial = team.gather(rows)
        left, right = (x, polynomial) if tall else (polynomial, x)
        if last is not None and step + 1 == len(triples):
            return last(left, right)
        multiply_add(left, right, None if on_diagonal else x, beta=a, out=spare)
        # a product cannot overwrite its own operand, so iterates alternate
        x, spare = spare, x
    return x


FLOAT16_NORM = 64.0
"""Initial norm of float16 iterates, which keeps the entries of Gram matrices in range."""


def rescaled(triples: Sequence[Triple], scale: float) -> tuple[tuple[Triple, ...], float]:
    """Return triples that make iterates known multiples of the originals, and the last multiple.

    The first multiple is ``scale``, the others are within a factor of ``sqrt(2)`` of it; see Note
    [Float16 range].
    """
    found: list[Triple] = []
    begin = scale
    for a, b, c in triples:
        # the power of two that keeps the multiple nearest to the first one
        power = math.copysign(2.0 ** round(math.log2(abs(a) * begin / scale)), a) if a else 0.0
        change = power / a if a else 1.0
        # if X is `scale` times as large, A is scale^2 and A^2 scale^4 times as large
        found.append((power, change * b / scale**2, change * c / scale**4))
        scale *= change
    return tuple(found), scale


def accumulate(a: Tensor, triples: Sequence[Triple], team: TeamSum | None = None) -> Tensor:
    """Return the product ``Q`` of the factors of several steps; ``a`` is the Gram matrix of ``X``.

    ``k`` steps take ``(8 k - 6) m^3`` FLOPs: the first needs no product with ``Q``, the last no new
    Gram matrix. In a team, each rank computes its rows of every product.
    """
    q: Tensor | None = None
    first_row = 0 if team is None else team.rows(a.shape[-1])[0]
    for step, (first, second, third) in enumerate(triples):
        mine, last = _rows_of(a, team), step + 1 == len(triples)
        polynomial = multiply_add(mine, a, mine, beta=second, alpha=third)
        polynomial.diagonal(first_row, -2, -1).add_(first)
        # a rank's rows of P, times the whole Q, are its rows of the new Q
        if q is not None:
            q = _gathered(multiply_add(polynomial, q), team)
        if q is None or not last:
            whole = _gathered(polynomial, team)
            q = whole if q is None else q
        if not last:
            # P^2 A diverged on rank one plus noise: rounding P^2 can make eigenvalues negative,
            # rounding an inner factor of P A P does not
            a = _gathered(multiply_add(multiply_add(polynomial, a), whole), team)
    assert q is not None, "a segment holds at least one step"
    return q


_MOST_GROWTH = 16.0
"""Growth of small singular values in two steps up to which a half ``Q`` is accurate enough."""


def _accumulate_halves(a: Tensor, triples: Sequence[Triple], *, is_first: bool) -> Tensor:
    """Return what :func:`accumulate` does, by half products; see Note [Half products]."""
    q: Tensor | None = None
    # what is still to be added to the diagonal of Q
    missing = 0.0
    for step, (first, second, third) in enumerate(triples):
        alone = first if len(triples) == 1 else 0.0
        rest = symmetric(a, a, a, beta=second, alpha=third, diagonal=alone)
        if q is None:
            q, missing = rest, first
        else:
            numbers = {"beta": first, "gamma": missing, "diagonal": first * missing}
            is_half = is_first and abs(first * missing) <= _MOST_GROWTH
            out = torch.empty_like(q)
            q, missing = products.multiply(rest, q, out, q, symmetric=is_half, **numbers), 0.0
        if step + 1 < len(triples):
            inner = symmetric(rest, a, a, beta=first)
            a = symmetric(inner, rest, inner, beta=first)
    assert q is not None, "a segment holds at least one step"
    return q


def _gathered(rows: Tensor, team: TeamSum | None) -> Tensor:
    return rows if team is None else team.gather(rows)


def _rows_of(whole: Tensor, team: TeamSum | None) -> Tensor:
    if team is None:
        return whole
    start, stop = team.rows(whole.shape[-1])
    return whole[..., start:stop, :]


def iterate_gram(
    x: Tensor,
    triples: Sequence[Triple],
    plan: IterationPlan,
    reduce: ReduceT | None = None,
    *,
    tall: bool = False,
    spare: Tensor | None = None,
    last: LastT | None = None,
) -> Tensor:
    """Run all steps on Gram matrices, with a new one at each restart; return the last iterate.

    ``x``, ``spare`` and ``last`` are as in :func:`iterate_standard`. ``reduce`` is called with the
    Gram matrix once per segment between restarts. A team also gathers, see Note [Teams].
    """
    team = reduce if isinstance(reduce, TeamSum) else None
    spare = torch.empty_like(x) if spare is None else spare
    for start, stop in pairwise((0, *plan.restarts, len(triples))):
        wide = x.mT if tall else x
        a = symmetric(wide, wide.mT)
        a = a if reduce is None else reduce(a)
        if team is None and products.serves(a):
            q = _accumulate_halves(a, triples[start:stop], is_first=start == 0)
        else:
            q = accumulate(a, triples[start:stop], team)
        left, right = (x, q) if tall else (q, x)
        if last is not None and stop == len(triples):
            return last(left, right)
        x, spare = multiply_add(left, right, out=spare), x
    return x
