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

    Every small matrix is held as ``scalar * I + residual``, the scalars on the host and known
    before the data. In the *shifted* form the scalar sits where most eigenvalues are and its part
    of every product is exact: in 16 bits the rounding of a large diagonal is what makes the plain
    form less accurate than the standard iteration. Small float32 matrices do without, which saves
    passes.

    The three pieces (:func:`gram_residual`, :func:`accumulate`, :func:`apply`) serve a matrix whose
    long side is cut over ranks as they are: only the first needs a sum over the ranks.

Note [Teams]
    Ranks that share a matrix may divide the products of small matrices, too: each computes the same
    number of their rows. A left operand needs these rows alone, so only what stands on the right of
    a later product is gathered: polynomials, the Gram matrices that follow, and ``Q`` at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor

from megatron_eopt.math.algorithm import Plan
from megatron_eopt.math.coefficients import Triple, response
from megatron_eopt.math.products import multiply_add

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
    if shift == 0.0:
        return Shifted(0.0, _reduced(multiply_add(wide, wide.mT), reduce))
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
    rows = right if team is None else _rows_of(right, team)
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


def _unshifted(q: Shifted, first_row: int = 0) -> Shifted:
    """Return a copy without identity part, of a matrix or of its rows from ``first_row`` on."""
    copy = Shifted(0.0, q.residual.clone())
    copy.residual.diagonal(first_row, dim1=-2, dim2=-1).add_(q.shift)
    return copy


def accumulate(
    a: Shifted,
    triples: Sequence[Triple],
    *,
    shifted: bool = True,
    team: Team | None = None,
) -> Shifted:
    """Return the factor ``Q`` with which several steps multiply ``X``, whose Gram matrix is ``a``.

    ``(8 k - 6) m^3`` FLOPs for ``k`` steps: the first needs no product with ``Q``, the last leaves
    no Gram matrix behind. A team divides them.
    """
    if team is not None:
        return _accumulate_rows(a, triples, team, shifted=shifted)
    q: Shifted | None = None
    for step, triple in enumerate(triples):
        polynomial = _polynomial(a, a, triple)
        if q is None:
            q = polynomial if shifted else _unshifted(polynomial)
        else:
            q = _product(polynomial, q)
        if step + 1 < len(triples):
            # P^2 A is one pass cheaper and diverged on rank one plus noise: rounding an inner
            # factor of P A P keeps eigenvalues from turning negative, rounding P^2 does not;
            # without a name the inner one goes at once
            a = _product(polynomial, _product(polynomial, a))
    assert q is not None, "a segment holds at least one step"
    return q


def _accumulate_rows(
    a: Shifted, triples: Sequence[Triple], team: Team, *, shifted: bool
) -> Shifted:
    """Do the same with this rank's rows of every product, gathering what stands on the right."""
    m = a.residual.shape[-1]
    mine, q, whole_q = _rows_of(a, team), None, None
    for step, triple in enumerate(triples):
        polynomial, last = _polynomial(mine, a, triple), step + 1 == len(triples)
        # the last one stands on the right only where no rank has all of Q
        alone = last and (q is None or whole_q is not None)
        whole = polynomial if alone else _gathered(polynomial, team)
        if q is None:
            q = polynomial if shifted else _unshifted(polynomial, team.rows(m)[0])
        elif last and whole_q is not None:
            q = _product(polynomial, whole_q, team)
        else:
            q = _product(q, whole, team)
        if not last:
            whole_q = None if step else whole if shifted else _unshifted(whole)
            mine = _product(_product(polynomial, a, team), whole, team)
            a = _gathered(mine, team)
    assert q is not None, "a segment holds at least one step"
    return _gathered(q, team)


def _gathered(rows: Shifted, team: Team) -> Shifted:
    return Shifted(rows.shift, team.gather(rows.residual))


def _rows_of(whole: Shifted, team: Team) -> Shifted:
    start, stop = team.rows(whole.residual.shape[-1])
    return Shifted(whole.shift, whole.residual[..., start:stop, :])


def apply(q: Shifted, x: Tensor, out: Tensor | None = None, *, tall: bool = False) -> Tensor:
    """Return ``Q X`` (``X Q`` if ``tall``), shaped like ``x``; no communication."""
    left, right = (x, q.residual) if tall else (q.residual, x)
    return multiply_add(left, right, x if q.shift else None, beta=q.shift, out=out)


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
        shift = expected_shift(triples[:start], m) if plan.shifted else 0.0
        a = gram_residual(x, shift, reduce, columns=columns, tall=tall)
        segment = triples[start:stop]
        q = accumulate(a, segment, shifted=plan.shifted, team=_team(reduce))
        x, spare = apply(q, x, out=spare, tall=tall), x
    return x


def _team(reduce: ReduceT | None) -> Team | None:
    return cast(Team, reduce) if hasattr(reduce, "gather") else None


def _reduced(gram: Tensor, reduce: ReduceT | None) -> Tensor:
    return gram if reduce is None else reduce(gram)
