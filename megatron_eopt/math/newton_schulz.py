"""The Newton-Schulz iteration, by the book and on Gram matrices.

Shapes: a *wide* matrix is ``(m, n)`` or ``(batch, m, n)`` with ``m <= n``; callers transpose first,
so that the Gram matrix is the small one. A matrix whose memory is tall stays tall (``tall=True``,
shape ``(n, m)``): the small matrices are symmetric, so only the side they multiply from changes,
while copying into the other order would cost more than a product in 16 bits. ``reduce`` sums a
tensor over the ranks that hold the other columns when the long side is cut; ``None`` means that
this rank holds all of them.

Note [Gram form]
    One step maps ``X`` to ``P X`` with ``P = a I + b A + c A^2``, ``A = X X^T``. All these matrices
    are polynomials of the first Gram matrix, so they are symmetric and commute, and the next Gram
    matrix is ``P A P`` without looking at ``X`` again. Several steps accumulate
    ``Q = ... P_2 P_1``; then ``Q X`` is one product with the long side. A *restart* applies ``Q``
    early and forms the Gram matrix anew, because rounding errors in ``A`` grow with the square of
    the singular values' amplification.

    Every small matrix is held as ``shift * I + residual``, the shifts on the host and known before
    the data. The shift sits where most eigenvalues are and its part of every product is exact: in
    16 bits the rounding of a large diagonal is what makes the plain form less accurate than the
    standard iteration.

    Of the three pieces (:func:`gram_residual`, :func:`accumulate`, :func:`apply`) only the first
    needs a sum over the ranks where the long side is cut.

Note [Teams]
    Ranks that share a matrix may divide the products of small matrices, too: each computes the same
    number of their rows. A left operand needs these rows alone, so only what stands on the right of
    a later product is gathered: polynomials, the Gram matrices that follow, and ``Q``.

Note [Widened products]
    Many CPUs multiply entry by entry in 16 bits. There operands are widened: the product of two
    bfloat16 numbers is a float32 number, sums are float32 in either case, and the result is rounded
    once, so only the order of summation differs from other processors'.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor

from megatron_eopt.math.algorithm import Plan
from megatron_eopt.math.coefficients import Triple, response

ReduceT = Callable[[Tensor], Tensor]
"""Sums a contiguous tensor over the ranks that share a matrix; may work in place."""


class Team(Protocol):
    """A sum over ranks that also divide the rows of small matrices; see Note [Teams]."""

    def __call__(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks."""

    def rows(self, m: int) -> tuple[int, int]:
        """Return the first row of ``m`` that this rank computes, and one past its last."""

    def gather(self, block: Tensor) -> Tensor:
        """Return a whole matrix ``(..., m, m)`` of the ranks' rows ``(..., m / ranks, m)``."""


# Squares of smaller numbers leave float32; above it the clamp hides what underflows.
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

    Without ``add`` that is nothing. See Note [Widened products].
    """
    if is_widened(left):
        wide = None if add is None else add.float()
        total = multiply_add(left.float(), right.float(), wide, beta=beta, alpha=alpha, out=wide)
        return total.to(left.dtype) if out is None else out.copy_(total)
    if add is None:
        product = torch.matmul(left, right, out=out)
        return product if alpha == 1.0 else product.mul_(alpha)
    if left.ndim == 2:
        return torch.addmm(add, left, right, beta=beta, alpha=alpha, out=out)
    return torch.baddbmm(add, left, right, beta=beta, alpha=alpha, out=out)


def is_widened(matrix: Tensor) -> bool:
    """Return whether products with this matrix are computed in float32."""
    # a tensor of another class only says what a GPU would compute
    return type(matrix) is Tensor and matrix.is_cpu and not _has_instructions(matrix.dtype)


@cache
def _has_instructions(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices of this dtype by instructions for it."""
    if dtype.itemsize > 2:
        return True
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    # absent where torch was built without oneDNN
    supported: Callable[[], bool] = getattr(
        torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", lambda: False
    )
    return supported()


def normalize(
    x: Tensor,
    eps: float,
    dtype: torch.dtype,
    reduce: ReduceT | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Divide each matrix by its Frobenius norm, or by ``eps`` where that is larger.

    Rows are summed in float32 and then combined in float64: a flat float32 sum over the millions of
    entries of a weight loses up to four digits. The norm of a row beyond 1.8e19 overflows and gives
    a zero update; float64 input has no such limit.

    Returns:
        A contiguous tensor of this ``dtype``, shaped like ``x``, ``(..., m, n)`` of any float
        dtype; every spectral norm is at most 1. It is new, or ``out``, which is contiguous, of this
        dtype, and may be ``x``.
    """
    careful = x.dtype == torch.float64 or eps < _FLOAT32_SAFE_EPS
    # The norm over the contiguous dimension first: it is the fast one.
    rows = torch.linalg.vector_norm(
        x if x.stride(-1) <= x.stride(-2) else x.mT,
        dim=-1,
        dtype=torch.float64 if careful else torch.float32,
    )
    norm = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    if reduce is not None:
        norm = reduce(norm.square_()).sqrt_()
    factor = norm.clamp_(min=eps).reciprocal_()
    if x.dtype != torch.float64:
        factor = factor.to(torch.float32)
    if out is None:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    return torch.mul(x, factor[..., None, None], out=out)


def iterate_standard(
    x: Tensor,
    triples: Sequence[Triple],
    reduce: ReduceT | None = None,
    *,
    tall: bool = False,
    spare: Tensor | None = None,
) -> Tensor:
    """Run ``X <- a X + (b A + c A^2) X`` with ``A = X X^T`` once per triple, and return ``X``.

    ``x`` is normalised and will be overwritten; ``reduce`` is called once per step, with the Gram
    matrix, and a team gathers once per step. ``len(triples) * (4 n / m + 2) m^3`` FLOPs a matrix.
    Iterates lie in turn in ``spare``, like ``x`` and by default new, and in ``x``.
    """
    team = _team(reduce)
    m = x.shape[-1] if tall else x.shape[-2]
    square, polynomial = x.new_empty((2, *x.shape[:-2], m, m))
    spare = torch.empty_like(x) if spare is None else spare
    for a, b, c in triples:
        wide = x.mT if tall else x
        square = _reduced(multiply_add(wide, wide.mT, out=square), reduce)
        if team is None:
            multiply_add(square, square, square, beta=b, alpha=c, out=polynomial)
        else:
            mine = _rows_of(Shifted(0.0, square), team).residual
            polynomial = team.gather(multiply_add(mine, square, mine, beta=b, alpha=c))
        left, right = (x, polynomial) if tall else (polynomial, x)
        multiply_add(left, right, x, beta=a, out=spare)
        x, spare = spare, x
    return x


@dataclass(frozen=True)
class Shifted:
    """The symmetric matrix ``shift * I + residual``; ``residual`` is ``(..., m, m)``."""

    shift: float
    residual: Tensor


def expected_shift(triples: Sequence[Triple], m: int) -> float:
    """Return the shift for the Gram matrix of an ``m``-row matrix after ``triples``.

    Any value is exact algebra; a value near most eigenvalues loses least to rounding. Before the
    first step the trace is 1, so the mean eigenvalue is ``1 / m``. After some steps eigenvalues
    lie between 0 and where the mean went, and half of that measured best over the spectra of
    docs/numerics.md.
    """
    if not triples:
        return 1.0 / m
    return 0.5 * response(triples, m**-0.5) ** 2


def gram_residual(
    x: Tensor,
    shift: float,
    reduce: ReduceT | None = None,
    *,
    columns: int | None = None,
    tall: bool = False,
) -> Shifted:
    """Return the Gram matrix of the whole matrix split into ``shift * I`` and the rest.

    One call of ``reduce``; ``columns`` are those of the whole matrix, if ``x`` has only some.
    """
    wide = x.mT if tall else x
    m, n = wide.shape[-2:]
    share = n / columns if columns else 1.0
    eye = wide.new_zeros((*wide.shape[:-1], m))
    eye.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    residual = multiply_add(wide, wide.mT, eye, beta=-shift * share, out=eye)
    return Shifted(shift, _reduced(residual, reduce))


def _product(left: Shifted, right: Shifted, team: Team | None = None) -> Shifted:
    """Return the product of two commuting matrices; one matrix product.

    With a team ``left`` has this rank's rows alone, and so has the product.

    ``(l I + L)(r I + R) = l r I + (l R + r L + L R)``; the two terms without a product become the
    addend of one fused call, scaled by the larger factor so that no division can blow up.
    """
    rows = _rows_of(right, team)
    big, small = (left, rows) if abs(left.shift) >= abs(right.shift) else (rows, left)
    shift = left.shift * right.shift
    addend: Tensor | None = None if big.shift == 0.0 else small.residual
    out: Tensor | None = None
    if addend is not None and small.shift != 0.0:
        addend = out = torch.add(addend, big.residual, alpha=small.shift / big.shift)
    product = multiply_add(left.residual, right.residual, addend, beta=big.shift, out=out)
    return Shifted(shift, product)


def _polynomial(mine: Shifted, a: Shifted, triple: Triple) -> Shifted:
    """Return one step's polynomial of ``a``, as far as ``mine`` has rows of ``a``."""
    first, second, third = triple
    slope = second + 2.0 * third * a.shift
    part = mine.residual
    rest = multiply_add(part, a.residual, part, beta=slope, alpha=third)
    return Shifted(first + a.shift * (second + third * a.shift), rest)


def accumulate(a: Shifted, triples: Sequence[Triple], team: Team | None = None) -> Shifted:
    """Return the factor ``Q`` with which several steps multiply ``X``, whose Gram matrix is ``a``.

    ``(8 k - 6) m^3`` FLOPs for ``k`` steps: the first needs no product with ``Q``, the last leaves
    no Gram matrix behind. A team divides them; each rank computes its rows of every product.
    """
    q: Shifted | None = None
    mine = _rows_of(a, team)
    for step, triple in enumerate(triples):
        polynomial, last = _polynomial(mine, a, triple), step + 1 == len(triples)
        if q is not None:
            q = _gathered(_product(polynomial, q, team), team)
        if q is None or not last:
            whole = _gathered(polynomial, team)
            q = whole if q is None else q
        if not last:
            # P^2 A is one pass cheaper and diverged on rank one plus noise: rounding an inner
            # factor of P A P keeps eigenvalues from turning negative, rounding P^2 does not;
            # without a name the inner one goes at once
            mine = _product(_product(polynomial, a, team), whole, team)
            a = _gathered(mine, team)
    assert q is not None, "a segment holds at least one step"
    return q


def _gathered(rows: Shifted, team: Team | None) -> Shifted:
    return rows if team is None else Shifted(rows.shift, team.gather(rows.residual))


def _rows_of(whole: Shifted, team: Team | None) -> Shifted:
    if team is None:
        return whole
    start, stop = team.rows(whole.residual.shape[-1])
    return Shifted(whole.shift, whole.residual[..., start:stop, :])


def apply(q: Shifted, x: Tensor, out: Tensor | None = None, *, tall: bool = False) -> Tensor:
    """Return ``Q X`` (``X Q`` if ``tall``), shaped like ``x``; no communication."""
    left, right = (x, q.residual) if tall else (q.residual, x)
    return multiply_add(left, right, x, beta=q.shift, out=out)


def iterate_gram(
    x: Tensor,
    triples: Sequence[Triple],
    plan: Plan,
    reduce: ReduceT | None = None,
    *,
    columns: int | None = None,
    tall: bool = False,
    spare: Tensor | None = None,
) -> Tensor:
    """Run all steps on Gram matrices, forming a fresh one before each of the plan's restarts.

    Returns the last iterate. ``x`` is normalised and will be overwritten; ``reduce`` is called once
    per segment, with a Gram matrix; ``columns`` are those of the whole matrix, if ``x`` has only
    some. A team gathers as Note [Teams] says. Iterates, one a segment, lie in turn in ``spare``,
    like ``x`` and by default new, and in ``x``.
    """
    m = x.shape[-1] if tall else x.shape[-2]
    for start, stop in pairwise((0, *plan.restarts, len(triples))):
        shift = expected_shift(triples[:start], m)
        a = gram_residual(x, shift, reduce, columns=columns, tall=tall)
        q = accumulate(a, triples[start:stop], _team(reduce))
        x, spare = apply(q, x, out=spare, tall=tall), x
    return x


def _team(reduce: ReduceT | None) -> Team | None:
    return cast(Team, reduce) if hasattr(reduce, "gather") else None


def _reduced(gram: Tensor, reduce: ReduceT | None) -> Tensor:
    return gram if reduce is None else reduce(gram)
