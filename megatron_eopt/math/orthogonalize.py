"""The entry point through which every optimizer orthogonalizes its matrices."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from megatron_eopt.base.address import address_of
from megatron_eopt.base.errors import ConfigurationError, check_choice, check_number
from megatron_eopt.math import products
from megatron_eopt.math.algorithm import (
    AlgorithmT,
    IterationPlan,
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

# With adamw_rms, updates are about as large as AdamW's, so its learning rate and weight decay carry
# over (Moonlight, arXiv:2502.16982, section 2.2).
SCALE_MODES: dict[str, tuple[str, Callable[[int, int], float]]] = {
    "spectral": ("sqrt(max(m, n))", lambda m, n: math.sqrt(max(m, n))),
    "unit_rms_norm": ("sqrt(m / n)", lambda m, n: math.sqrt(m / n)),
    "shape_scaling": ("sqrt(max(1, m / n))", lambda m, n: math.sqrt(max(1.0, m / n))),
    "adamw_rms": ("0.2 sqrt(max(m, n))", lambda m, n: 0.2 * math.sqrt(max(m, n))),
}
"""Scale factors of an update, as text and as function of the whole logical matrix's shape."""

_WITHIN_FLOAT16 = (2.0**-10, 2.0**10)  # factors that keep float16 iterates within range


def scale_factor(
    rows: int, columns: int, mode: str = "spectral", extra_scale_factor: float = 1.0
) -> float:
    """Return the factor on an orthogonal update, from the shape of the whole logical matrix.

    Raises:
        ConfigurationError: If ``mode`` is unknown or ``extra_scale_factor`` is not finite.
        ConfigurationTypeError: If ``extra_scale_factor`` is not a number.
    """
    check_choice("scale_mode", mode, SCALE_MODES)
    check_number("extra_scale_factor", extra_scale_factor)
    _, factor = SCALE_MODES[mode]
    return factor(rows, columns) * extra_scale_factor


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
    scale_mode: str = "spectral"  # one of SCALE_MODES, scales updates by the matrix's shape
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

    def __call__(
        self,
        x: Tensor,
        *,
        scale: float | tuple[float, ...] = 1.0,
        reduce: ReduceT | None = None,
        whole_shape: tuple[int, int] | None = None,
    ) -> Tensor:
        """Return orthogonal factors; see :func:`orthogonalize`."""
        if x.ndim < 2:
            rule = "must have the shape (m, n) or (..., m, n), because only matrices can be "
            hint = "Train vectors and scalars with an element-wise optimizer"
            raise ConfigurationError("x", tuple(x.shape), rule + "orthogonalized", hint)
        shape = (x.shape[-2], x.shape[-1]) if whole_shape is None else whole_shape
        stack = x.detach().unsqueeze(0) if x.ndim == 2 else x.detach().flatten(0, -3)
        # not of `flatten`, which may return `x` itself
        stack = stack.clone()
        self.factors_(stack, reduce, shape, scale if isinstance(scale, tuple) else (scale,))
        return stack.reshape(x.shape)

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

    @torch.no_grad()
    def factors_(
        self,
        stack: Tensor,
        reduce: ReduceT | None,
        shape: tuple[int, int],
        scales: tuple[float, ...] = (),
        squares: Tensor | None = None,
    ) -> None:
        """Replace a stack ``(batch, rows, cols)`` by orthogonal factors times ``scales``, in place.

        With ``reduce``, ranks share the long side of matrices of this ``shape``; otherwise the
        shape is the stack's own. A batch of one is computed as a 2-D matrix. ``squares`` ``(batch,
        parts)`` are sums of squares, if known.
        """
        if len(stack) == 1:
            stack, squares = stack[0], None if squares is None else squares[0]
        rows, columns = stack.shape[-2:]
        # pieces in blockwise mode, too, are matrices of their own
        shape = (rows, columns) if reduce is None else shape
        other = self._other
        # The packages compute whole matrices in 16 bits. `auto` must not be less accurate than our
        # own iteration, and a backend chosen by name is used as it is.
        if self.backend == "auto" and (reduce or not is_studied(shape, self._schedule)):
            other = None
        wide = stack.mT if shape[0] > shape[1] else stack
        # "medium" casts operands explicitly; the few float32 products left must be exact
        with matmul_precision("high" if self._products == "high" else "highest"):
            if other is None:
                form = _form(
                    shape,
                    wide.shape[-2],
                    wide.dtype,
                    self.precision,
                    self._schedule,
                    self.algorithm,
                    math.prod(scales),
                    products.serves(wide, torch.bfloat16),
                )
                _iterate_(wide, form, self.eps, reduce, squares)
                return
            if reduce is not None:
                rule = "computes whole matrices only, but the ranks share the long side of this one"
                hint = "Use backend='torch' or a TP mode other than 'distributed'"
                raise ConfigurationError("backend", self.backend, rule, hint)
            plan = choose_algorithm(shape, wide.dtype, self.precision, self._schedule, self._chosen)
            result = other.compute(wide, self._schedule, plan, self.eps).to(wide.dtype)
        # one after the other, as upstream rounds after each; our iteration has applied them already
        for factor in scales:
            if factor != 1.0:
                result = result * factor
        wide.copy_(result)


class _Form(NamedTuple):
    """How the iteration computes matrices of one shape."""

    plan: IterationPlan
    schedule: tuple[Triple, ...]  # scaled, so that little or nothing remains to be done
    norm: float  # Frobenius norm of the first iterate
    rest: float  # what the last iterate has to be multiplied by
    ends_in_first: bool  # whether the buffer of the first iterate has the last one, too


@lru_cache(maxsize=4096)
def _form(
    shape: tuple[int, int],
    short_side: int,
    dtype: torch.dtype,
    precision: PrecisionT,
    schedule: tuple[Triple, ...],
    algorithm: AlgorithmT,
    factor: float,
    has_kernels: bool,
) -> _Form:
    """Decide how to compute orthogonal factors times ``factor``."""
    plan = choose_algorithm(shape, dtype, precision, schedule, algorithm).stable(short_side)
    # the standard form too, see Note [Float16 range]
    if plan.dtype == torch.bfloat16 and has_kernels:
        plan = replace(plan, dtype=torch.float16)
    # iterates alternate between two buffers
    is_even = plan.products(len(schedule)) % 2 == 0
    if plan.dtype == torch.float16:
        scaled, scale = rescaled(schedule, FLOAT16_NORM)
        return _Form(plan, scaled, FLOAT16_NORM, factor / scale, is_even)
    a, b, c = schedule[-1]
    last = (a * factor, b * factor, c * factor)
    return _Form(plan, (*schedule[:-1], last), 1.0, 1.0, is_even)


def _iterate_(
    wide: Tensor, form: _Form, eps: float, reduce: ReduceT | None, squares: Tensor | None
) -> None:
    """Replace this rank's parts of wide matrices by their orthogonal factors."""
    dtype = form.plan.dtype
    tall = wide.stride(-2) < wide.stride(-1)
    own = x = wide.mT if tall else wide
    place = None
    if own.dtype.itemsize == dtype.itemsize and own.is_contiguous():
        # another dtype of the same width: iterates use the caller's memory as they please
        place = own.view(dtype)
        # unless kernels take iterates from new memory only, since this one is not aligned
        if products.serves(wide, dtype) and not products.serves(place):
            place = None
    # the last iterate must be in `place`
    first, spare = (place, None) if form.ends_in_first else (None, place)
    x = normalize(x, eps, dtype, reduce, norm=form.norm, out=first, squares=squares)
    finish: LastT | None = None
    if dtype == torch.float16 and products.serves(x):
        # the last product also multiplies by what remains, and rounds once
        result = torch.empty_like(x, dtype=wide.dtype) if place is None else own
        finish = partial(products.multiply, out=result, alpha=form.rest)
    buffers: dict[str, Any] = {"tall": tall, "spare": spare, "last": finish}
    if form.plan.algorithm == "standard":
        x = iterate_standard(x, form.schedule, reduce, **buffers)
    else:
        x = iterate_gram(x, form.schedule, form.plan, reduce, **buffers)
    if dtype == torch.float16 and finish is None:
        last: float | Tensor = form.rest
        if not _WITHIN_FLOAT16[0] <= abs(form.rest) <= _WITHIN_FLOAT16[1]:
            # a 1-D factor makes the product float32 before it is rounded
            last = torch.full((1,), form.rest, dtype=torch.float32, device=x.device)
        # `own` may be the memory of `x`, read as another dtype; element by element that is safe
        x = torch.mul(x, last, out=torch.empty_like(x, dtype=wide.dtype) if place is None else own)
    # a view of another dtype has the same memory
    if address_of(x) != address_of(own):
        own.copy_(x)


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
