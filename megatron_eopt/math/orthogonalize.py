"""The entry point through which every optimizer orthogonalizes its matrices."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_eopt.base.address import address_of
from megatron_eopt.base.errors import ConfigurationError, check_choice, check_number
from megatron_eopt.math import products
from megatron_eopt.math.algorithm import (
    AlgorithmT,
    Plan,
    PrecisionT,
    choose_algorithm,
    is_studied,
    sound_precision,
)
from megatron_eopt.math.backends import Backend, get_backend
from megatron_eopt.math.coefficients import CoefficientsLike, Triple, resolve_coefficients
from megatron_eopt.math.newton_schulz import (
    FLOAT16_NORM,
    LastT,
    ReduceT,
    iterate_gram,
    iterate_standard,
    normalize,
    rescaled,
)
from megatron_eopt.math.precision import matmul_precision

DEFAULT_EPS = 1e-7
"""Smallest Frobenius norm to divide by, the default of emerging-optimizers 0.3."""

SMALLEST_EPS = 1e-36
"""Smallest valid ``eps``: reciprocals of smaller values overflow float32."""

ScaleModeT = Literal["spectral", "unit_rms_norm", "shape_scaling", "adamw_rms"]
"""Scale factor of an update, from the shape ``(out, in)`` of the whole logical matrix:

* ``spectral``: ``sqrt(max(out, in))``.
* ``unit_rms_norm``: ``sqrt(out / in)``.
* ``shape_scaling``: ``sqrt(max(1, out / in))``.
* ``adamw_rms``: ``0.2 sqrt(max(out, in))``, which matches the typical RMS of AdamW's updates, so
  its learning rate and weight decay carry over (Moonlight, arXiv:2502.16982, section 2.2).
"""

_WITHIN_FLOAT16 = (2.0**-10, 2.0**10)  # factors that keep float16 iterates within range

SCALE_MODES: tuple[ScaleModeT, ...] = get_args(ScaleModeT)


def scale_factor(
    rows: int, columns: int, mode: ScaleModeT = "spectral", extra_scale_factor: float = 1.0
) -> float:
    """Return the factor on an orthogonal update, from the shape of the whole logical matrix.

    Raises:
        ConfigurationError: If ``mode`` is unknown or ``extra_scale_factor`` is not finite.
        ConfigurationTypeError: If ``extra_scale_factor`` is not a number.
    """
    check_choice("scale_mode", mode, SCALE_MODES)
    check_number("extra_scale_factor", extra_scale_factor)
    match mode:
        case "spectral":
            factor = math.sqrt(max(rows, columns))
        case "unit_rms_norm":
            factor = math.sqrt(rows / columns)
        case "shape_scaling":
            factor = math.sqrt(max(1.0, rows / columns))
        case "adamw_rms":
            factor = 0.2 * math.sqrt(max(rows, columns))
    return factor * extra_scale_factor


@dataclass(frozen=True)
class Orthogonalization:
    """Replaces matrices by (about) the nearest semi-orthogonal ones, ``U V^T`` of the SVD.

    Whatever does not depend on the data is decided when the object is made, or once per shape.

    Raises:
        ConfigurationError: If a value is unknown or out of bounds, or the backend is missing or
            does not support the algorithm or precision.
        ConfigurationTypeError: If a value has the wrong type.
    """

    coefficients: CoefficientsLike = "quintic"  # a set of emerging-optimizers, or your own triples
    steps: int = 5  # number of iterations, at least 1
    algorithm: AlgorithmT = "auto"  # ``auto`` decides by cost and measured accuracy
    precision: PrecisionT = "highest"  # of matrix products; float64 input ignores it
    eps: float = DEFAULT_EPS  # smallest norm to divide by, at least SMALLEST_EPS
    backend: str = "torch"  # see :mod:`megatron_eopt.math.backends`
    scale_mode: ScaleModeT = "spectral"  # scales updates by the matrix's shape
    extra_scale_factor: float = 1.0  # a further factor on updates
    _schedule: tuple[Triple, ...] = field(init=False, repr=False)
    # another package's backend; None for our own iteration
    _other: Backend | None = field(init=False, repr=False)
    _chosen: AlgorithmT = field(init=False, repr=False)
    _products: PrecisionT = field(init=False, repr=False)  # precision that the schedule stands

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, get_args(PrecisionT))
        check_number("eps", self.eps, at_least=SMALLEST_EPS)
        # for its checks, so that a wrong mode is an error before the first step
        scale_factor(1, 1, self.scale_mode, self.extra_scale_factor)
        schedule = resolve_coefficients(self.coefficients, self.steps)
        # the packages that ``auto`` can pick compute in 16 bits only
        is_own = self.backend == "auto" and self.precision != "medium"
        other = None if is_own else get_backend(self.backend)
        offered = get_args(AlgorithmT) if other is None else other.algorithms
        chosen = offered[0] if self.algorithm == "auto" else self.algorithm
        if chosen not in offered:
            rule = f"backend {self.backend!r} supports only {' or '.join(offered)}"
            hint = "Use algorithm='auto' or backend='torch'"
            raise ConfigurationError("algorithm", self.algorithm, rule, hint)
        if other is not None and other.half and self.precision != "medium":
            hint = "Set precision='medium' or use backend='torch'"
            raise ConfigurationError("backend", self.backend, "computes in 16 bits only", hint)
        is_half = other is not None and other.half and self.backend != "auto"
        if is_half and sound_precision(schedule, "medium") != "medium":
            rule = f"diverge in 16 bits, but backend {self.backend!r} computes in 16 bits only"
            hint = "Use other coefficients, or precision='highest' with backend='torch'"
            raise ConfigurationError("coefficients", self.coefficients, rule, hint)
        object.__setattr__(self, "_schedule", schedule)
        object.__setattr__(self, "_other", other)
        object.__setattr__(self, "_chosen", chosen)
        object.__setattr__(self, "_products", sound_precision(schedule, self.precision))

    @torch.no_grad()
    def __call__(
        self,
        x: Tensor,
        *,
        scale: float | tuple[float, ...] = 1.0,
        reduce: ReduceT | None = None,
        whole_shape: tuple[int, int] | None = None,
        in_place: bool = False,
        squares: Tensor | None = None,
    ) -> Tensor:
        """Return orthogonal factors, in ``x`` itself if ``in_place``; see :func:`orthogonalize`."""
        if x.ndim < 2:
            rule = "must have the shape (m, n) or (..., m, n), because only matrices can be "
            hint = "Train vectors and scalars with an element-wise optimizer"
            raise ConfigurationError("x", tuple(x.shape), rule + "orthogonalized", hint)
        shape = (x.shape[-2], x.shape[-1]) if whole_shape is None else whole_shape
        other = self._other
        # The packages compute whole matrices in 16 bits. `auto` must not be less accurate than our
        # own iteration, and a backend chosen by name is used as it is.
        if self.backend == "auto" and (reduce or not is_studied(shape, self._schedule)):
            other = None
        algorithm = self.algorithm if other is None else self._chosen
        plan = choose_algorithm(shape, x.dtype, self.precision, self._schedule, algorithm)
        transposed = shape[0] > shape[1]
        wide = x.mT if transposed else x
        # kernels and `baddbmm` take one batch dimension
        if x.ndim > 3:
            wide = wide.flatten(0, -3)
        factors = scale if isinstance(scale, tuple) else (scale,)
        # "medium" casts operands explicitly; the few float32 products left must be exact
        with matmul_precision("high" if self._products == "high" else "highest"):
            if other is None:
                out = wide if in_place else None
                factor = math.prod(factors)
                given = (reduce, out, squares)
                result = _iterate(wide, self._schedule, factor, plan, self.eps, *given)
            elif reduce is None:
                result = other.compute(wide, self._schedule, plan, self.eps)
            else:
                rule = "computes whole matrices only, but the ranks share the long side of this one"
                hint = "Use backend='torch' or a TP mode other than 'distributed'"
                raise ConfigurationError("backend", self.backend, rule, hint)
        result = result.to(x.dtype)
        result = (result.mT if transposed else result).reshape(x.shape)
        # one after the other, as upstream rounds after each; our iteration has applied them already
        for factor in factors if other else ():
            if factor != 1.0:
                result = result * factor
        if not in_place:
            return result
        # not `is`: the result may be another view of the same memory
        return x if address_of(result) == address_of(x) else x.copy_(result)

    @property
    def whole_only(self) -> bool:
        """Whether the backend computes whole matrices only, so that ranks cannot share one."""
        return self._other is not None and self.backend != "auto"

    @property
    def stack_dtype(self) -> torch.dtype:
        """Dtype in which matrices are communicated and stacked.

        With ``precision="medium"`` it is bfloat16: half the bytes, and the same update at every
        layout. A backend that was chosen by name rounds by itself and gets float32.
        """
        return (
            torch.bfloat16 if self.precision == "medium" and not self.whole_only else torch.float32
        )

    def scale(self, shape: tuple[int, int]) -> float:
        """Return the factor on updates of matrices of this shape."""
        return scale_factor(*shape, self.scale_mode, self.extra_scale_factor)

    def scales(self, shape: tuple[int, int]) -> tuple[float, float]:
        """Return the two factors of the scale, since other packages round after each of them."""
        return scale_factor(*shape, self.scale_mode), self.extra_scale_factor

    def factors_(
        self,
        stack: Tensor,
        reduce: ReduceT | None,
        shape: tuple[int, int],
        scales: tuple[float, ...] = (),
        squares: Tensor | None = None,
    ) -> None:
        """Replace a stack ``(batch, rows, cols)`` by orthogonal factors times ``scales``, in place.

        With ``reduce``, ranks share the long side of matrices of this ``shape``. A batch of one is
        computed as a 2-D matrix. ``squares`` ``(batch, parts)`` are sums of squares, if known.
        """
        # without `reduce` the stack has whole matrices, whose shape is its own; pieces in blockwise
        # mode, too
        whole_shape = None if reduce is None else shape
        if len(stack) == 1:
            stack, squares = stack[0], None if squares is None else squares[0]
        given: dict[str, Any] = {"whole_shape": whole_shape, "squares": squares}
        self(stack, scale=scales, reduce=reduce, in_place=True, **given)


def _iterate(
    wide: Tensor,
    schedule: tuple[Triple, ...],
    factor: float,
    plan: Plan,
    eps: float,
    reduce: ReduceT | None,
    out: Tensor | None,
    squares: Tensor | None,
) -> Tensor:
    """Orthogonalize this rank's parts of matrices and multiply the result by ``factor``.

    The result is written to ``out``, which may be ``wide``, if its dtype and strides allow it.
    """
    plan = plan.stable(wide.shape[-2])
    has_kernels = products.serves(wide, plan.dtype)
    # the standard form too, see Note [Float16 range]
    if plan.dtype == torch.bfloat16 and has_kernels:
        plan = replace(plan, dtype=torch.float16)
    tall = wide.stride(-2) < wide.stride(-1)
    x = wide.mT if tall else wide
    place = None
    if out is not None:
        out = out.mT if tall else out
        if out.dtype.itemsize == plan.dtype.itemsize and out.is_contiguous():
            # another dtype of the same width: iterates use the caller's memory as they please
            place = out.view(plan.dtype)
            # unless kernels take iterates from new memory only, since this one is not aligned
            if has_kernels and not products.serves(place):
                place = None
    # iterates alternate between two buffers, and the last one must be in `place`
    first, spare = (None, place) if plan.products(len(schedule)) % 2 else (place, None)
    norm, scale = 1.0, 1.0
    if plan.dtype == torch.float16:
        norm = FLOAT16_NORM
        schedule, scale = rescaled(schedule, norm)
    else:
        schedule = _scaled(schedule, factor)
    x = normalize(x, eps, plan.dtype, reduce, norm=norm, out=first, squares=squares)
    finish: LastT | None = None
    if plan.dtype == torch.float16 and products.serves(x):
        # the last product also multiplies by what remains, and rounds once
        result = torch.empty_like(x, dtype=wide.dtype) if out is None or place is None else out
        finish = partial(products.multiply, out=result, alpha=factor / scale)
    buffers: dict[str, Any] = {"tall": tall, "spare": spare, "last": finish}
    if plan.algorithm == "standard":
        x = iterate_standard(x, schedule, reduce, **buffers)
    else:
        x = iterate_gram(x, schedule, plan, reduce, **buffers)
    if plan.dtype == torch.float16 and finish is None:
        last: float | Tensor = factor / scale
        if not _WITHIN_FLOAT16[0] <= abs(factor / scale) <= _WITHIN_FLOAT16[1]:
            # a 1-D factor makes the product float32 before it is rounded
            last = torch.full((1,), factor / scale, dtype=torch.float32, device=x.device)
        # `out` may be the memory of `x`, read as another dtype; element by element that is safe
        x = torch.mul(x, last, out=torch.empty_like(x, dtype=wide.dtype) if place is None else out)
    return x.mT if tall else x


def _scaled(schedule: tuple[Triple, ...], factor: float) -> tuple[Triple, ...]:
    """Return a schedule whose result is ``factor`` times that of ``schedule``."""
    a, b, c = schedule[-1]
    return (*schedule[:-1], (a * factor, b * factor, c * factor))


def orthogonalize(
    x: Tensor,
    *,
    scale: float | tuple[float, ...] = 1.0,
    reduce: ReduceT | None = None,
    whole_shape: tuple[int, int] | None = None,
    **settings: Any,
) -> Tensor:
    """Replace each matrix by (about) the nearest semi-orthogonal one.

    A batch of matrices of one shape is one call. Zero, tiny and rank-deficient matrices give finite
    results. Inf and nan are not checked for, since that would synchronize the host.

    With ``reduce``, the matrix is cut along its longer side over several ranks, and each rank
    passes its part. Only squared norms (one sum) and Gram matrices are communicated: one sum per
    step in the standard iteration, one per segment between restarts in the Gram iteration.

    Args:
        x: ``(m, n)`` or ``(..., m, n)``; float64, float32, bfloat16 or float16; any strides. It is
            not modified.
        scale: A factor on the result, or several that are applied in turn. Our own iteration folds
            them into its last coefficients, without another pass or rounding.
        reduce: Sums a contiguous tensor over the ranks that share the matrix; may work in place.
        whole_shape: ``(rows, columns)`` of the whole matrix; required with ``reduce``.
        **settings: Fields of :class:`Orthogonalization`.

    Returns:
        A tensor of the shape and dtype of ``x``, detached from autograd.

    Raises:
        ConfigurationError: If an argument is out of bounds.
        ConfigurationTypeError: If an argument has the wrong type.
    """
    compute = Orthogonalization(**settings)
    return compute(x, scale=scale, reduce=reduce, whole_shape=whole_shape)
