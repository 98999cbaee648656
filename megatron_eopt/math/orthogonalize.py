"""The one entry through which every optimizer orthogonalizes."""

from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError, check_number
from megatron_eopt.math.algorithm import AlgorithmT, choose_algorithm
from megatron_eopt.math.backends import get_backend
from megatron_eopt.math.coefficients import CoefficientsLike, resolve_coefficients
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.precision import PrecisionT, check_precision, matmul_precision

DEFAULT_EPS = 1e-7
"""Smallest Frobenius norm that is divided by."""


def orthogonalize(
    x: Tensor,
    *,
    coefficients: CoefficientsLike = "quintic",
    steps: int = 5,
    algorithm: AlgorithmT = "auto",
    precision: PrecisionT = "highest",
    eps: float = DEFAULT_EPS,
    backend: str = "torch",
    scale: float = 1.0,
    reduce: ReduceT | None = None,
    whole_shape: tuple[int, int] | None = None,
) -> Tensor:
    """Replace each matrix by (about) its nearest semi-orthogonal one, ``U V^T`` of its SVD.

    A batch of equal shapes is one call. Zero, tiny and rank-deficient matrices give finite results;
    inf and nan are the caller's to refuse (:func:`megatron_eopt.math.finite.check_finite`), because
    looking for them here would synchronize the host.

    With ``reduce`` the matrix is cut along its longer side over several ranks, each calls with its
    piece, and only Gram matrices and squared norms travel: one sum per step in the standard
    iteration, one per restart in Gram's, plus one.

    Args:
        x: ``(m, n)`` or ``(..., m, n)``; float64, float32, bfloat16 or float16; any strides; not
            modified.
        coefficients: Name of a set of emerging-optimizers, or triples of your own.
        steps: Number of iterations, at least 1.
        algorithm: ``auto`` decides by cost and measured accuracy.
        precision: Precision of the products for every input but float64, which stays float64.
        eps: Smallest norm to divide by, above 0.
        backend: Who computes; see :mod:`megatron_eopt.math.backends`.
        scale: A factor on the result. Our own code puts it into the last step's coefficients, where
            it costs neither a pass over the matrix nor another rounding.
        reduce: Sums a tensor over the ranks that share the matrix; may work in place.
        whole_shape: ``(rows, columns)`` of the whole matrix; needed with ``reduce``.

    Returns:
        A tensor of the shape and dtype of ``x``.

    Raises:
        ConfigurationError: If an argument's value is out of bounds, the shape has a side of 0, or
            the piece is not cut along the longer side alone.
        ConfigurationTypeError: If an argument or the dtype is of the wrong kind.
    """
    check_precision(precision)
    check_number("eps", eps, above=0)
    schedule = resolve_coefficients(coefficients, steps)
    plug = get_backend(backend)
    shape = _whole_shape(x, reduce, whole_shape)
    planned = plug.algorithm(backend, algorithm)
    plan = choose_algorithm(shape, x.dtype, precision, schedule, planned)
    transposed = shape[0] > shape[1]
    wide = x.mT if transposed else x
    if x.ndim > 3:
        wide = wide.flatten(0, -3)
    if plug.linear_in_last_step:
        last = schedule[-1]
        schedule = (*schedule[:-1], (last[0] * scale, last[1] * scale, last[2] * scale))
    with matmul_precision(precision):
        result = plug.compute(wide, schedule, plan, eps=eps, reduce=reduce, columns=max(shape)).to(
            x.dtype
        )
    if scale != 1.0 and not plug.linear_in_last_step:
        result = result * scale
    return (result.mT if transposed else result).reshape(x.shape)


def _whole_shape(
    x: Tensor, reduce: ReduceT | None, whole_shape: tuple[int, int] | None
) -> tuple[int, int]:
    """Return rows and columns of the whole matrix, having checked that the piece fits."""
    if x.ndim < 2:
        raise ConfigurationTypeError(
            "x", tuple(x.shape), "must have at least two dimensions", "Give a matrix or a batch"
        )
    rows, columns = x.shape[-2:]
    if whole_shape is None:
        if reduce is not None:
            raise ConfigurationError(
                "whole_shape", None, "is needed with reduce", "Give rows and columns of the whole"
            )
        return rows, columns
    long = 0 if whole_shape[0] > whole_shape[1] else 1
    piece = (rows, columns)
    # a square matrix may be cut either way; its columns are taken to be the cut ones
    if piece[1 - long] != whole_shape[1 - long] or piece[long] > whole_shape[long]:
        raise ConfigurationError(
            "whole_shape",
            whole_shape,
            f"a piece of {rows} x {columns} must be cut along the longer side alone",
            "Redistribute it so that the shorter side is whole",
        )
    return whole_shape
