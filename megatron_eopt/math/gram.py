"""Gram Newton-Schulz: iterate on the small Gram matrix, touch the long side only at the ends.

One step maps ``X`` to ``P X`` with ``P = a I + b A + c A^2``, ``A = X X^T``. All these matrices are
polynomials of the first Gram matrix, so they are symmetric and commute, and the next Gram matrix is
``P A P`` without looking at ``X`` again. Several steps accumulate ``Q = ... P_2 P_1``; then ``Q X``
is one product with the long side. A *restart* applies ``Q`` early and forms the Gram matrix anew,
because rounding errors in ``A`` grow with the square of the singular values' amplification.

Every small matrix is held as ``scalar * I + residual``, the scalars on the host and known before
the data. In the *shifted* form the scalar sits where most eigenvalues are and its part of every
product is exact: in 16 bits the rounding of a large diagonal is what makes the plain form less
accurate than the standard iteration. Small float32 matrices do without, which saves passes.

The three pieces (:func:`gram_residual`, :func:`accumulate`, :func:`apply`) serve a matrix whose
long side is cut over ranks as they are: only the first needs a sum over the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from megatron_eopt.math.coefficients import Triple, response
from megatron_eopt.math.newton_schulz import ReduceT, multiply_add, multiply_long


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
    """Return ``X X^T`` split into ``shift * I`` and the rest.

    Args:
        x: ``(..., m, n)``, this rank's columns; ``(..., n, m)`` if ``tall``.
        shift: The scalar to split off.
        reduce: Sums over the ranks that hold the other columns; one call.
        columns: Columns of the whole matrix, if ``x`` has only some.
        tall: Whether ``x`` holds the transpose.

    Returns:
        The Gram matrix of the whole matrix, the same on every rank.
    """
    wide = x.mT if tall else x
    if shift == 0.0:
        square = torch.matmul(wide, wide.mT)
        return Shifted(0.0, square if reduce is None else reduce(square))
    m, n = wide.shape[-2:]
    share = n / columns if columns else 1.0
    eye = torch.eye(m, dtype=x.dtype, device=x.device).expand(*wide.shape[:-1], m)
    residual = multiply_add(eye, wide, wide.mT, beta=-shift * share)
    return Shifted(shift, residual if reduce is None else reduce(residual))


def _product(left: Shifted, right: Shifted) -> Shifted:
    """Return the product of two commuting matrices; one matrix product.

    ``(l I + L)(r I + R) = l r I + (l R + r L + L R)``; the two terms without a product become the
    addend of one fused call, scaled by the larger factor so that no division can blow up.
    """
    big, small = (left, right) if abs(left.shift) >= abs(right.shift) else (right, left)
    shift = left.shift * right.shift
    if big.shift == 0.0:
        return Shifted(shift, torch.matmul(left.residual, right.residual))
    if small.shift == 0.0:
        addend, out = small.residual, None
    else:
        out = torch.add(small.residual, big.residual, alpha=small.shift / big.shift)
        addend = out
    return Shifted(
        shift, multiply_add(addend, left.residual, right.residual, beta=big.shift, out=out)
    )


def _dense(a: Shifted) -> Shifted:
    """Return the same matrix with its identity part in a residual of its own."""
    residual = a.residual.clone()
    residual.diagonal(dim1=-2, dim2=-1).add_(a.shift)
    return Shifted(0.0, residual)


def accumulate(a: Shifted, triples: Sequence[Triple], *, shifted: bool = True) -> Shifted:
    """Return the factor ``Q`` with which several steps multiply ``X``.

    Args:
        a: The Gram matrix of ``X``.
        triples: The steps, at least one.
        shifted: Whether to keep the identity's part of ``Q`` apart.

    Returns:
        ``Q``. ``(8 k - 6) m^3`` FLOPs for ``k`` steps: the first needs no product with ``Q``, the
        last leaves no Gram matrix behind.
    """
    q: Shifted | None = None
    for step, (first, second, third) in enumerate(triples):
        mean, rest = a.shift, a.residual
        slope = second + 2.0 * third * mean
        polynomial = Shifted(
            first + mean * (second + third * mean),
            multiply_add(rest, rest, rest, beta=slope, alpha=third),
        )
        if q is None:
            q = polynomial if shifted else _dense(polynomial)
        else:
            q = _product(polynomial, q)
        if step + 1 < len(triples):
            # P^2 A is one pass cheaper and diverged on rank one plus noise: rounding an inner
            # factor of P A P keeps eigenvalues from turning negative, rounding P^2 does not
            a = _product(polynomial, _product(polynomial, a))
    assert q is not None, "a segment holds at least one step"
    return q


def apply(q: Shifted, x: Tensor, out: Tensor | None = None, *, tall: bool = False) -> Tensor:
    """Return ``Q X`` (``X Q`` if ``tall``), shaped like ``x``; no communication."""
    if q.shift == 0.0:
        return torch.matmul(*((x, q.residual) if tall else (q.residual, x)), out=out)
    return multiply_long(q.residual, x, beta=q.shift, tall=tall, out=out)


def iterate_gram(
    x: Tensor,
    triples: Sequence[Triple],
    restarts: Sequence[int] = (),
    reduce: ReduceT | None = None,
    *,
    columns: int | None = None,
    tall: bool = False,
    shifted: bool = True,
) -> Tensor:
    """Run all steps on Gram matrices, forming a fresh one before each step in ``restarts``.

    Args:
        x: Normalised wide matrices, ``(m, n)`` or ``(batch, m, n)``; their transposes if ``tall``;
            overwritten.
        triples: One ``(a, b, c)`` per step.
        restarts: Steps, counted from 0, ascending, that start on a fresh Gram matrix.
        reduce: Sums a Gram matrix over the ranks that share the long side, one call per segment.
        columns: Columns of the whole matrix, if ``x`` has only some of them.
        tall: Whether ``x`` holds transposes.
        shifted: Whether to keep identity parts exact.

    Returns:
        The last iterate, shaped like ``x``.
    """
    bounds = (0, *restarts, len(triples))
    spare: Tensor | None = None
    for start, stop in pairwise(bounds):
        m = x.shape[-1] if tall else x.shape[-2]
        shift = expected_shift(triples[:start], m) if shifted else 0.0
        a = gram_residual(x, shift, reduce, columns=columns, tall=tall)
        q = accumulate(a, triples[start:stop], shifted=shifted)
        result = apply(q, x, out=spare, tall=tall)
        x, spare = result, x
    return x
