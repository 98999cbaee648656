"""The one entry through which every optimizer orthogonalizes."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from emerging_optimizers.utils import fp32_matmul_precision
from torch import Tensor

from megatron_eopt.base.errors import check_choice, check_number
from megatron_eopt.base.places import place_of
from megatron_eopt.base.upstream import default_of
from megatron_eopt.math.algorithm import AlgorithmT, Plan, choose_algorithm
from megatron_eopt.math.backends import Backend, get_backend, register_backend
from megatron_eopt.math.coefficients import CoefficientsLike, Triple, resolve_coefficients
from megatron_eopt.math.newton_schulz import ReduceT, iterate_gram, iterate_standard
from megatron_eopt.math.normalization import normalize
from megatron_eopt.math.precision import PRECISIONS, PrecisionT
from megatron_eopt.math.scaling import ScaleModeT, scale_factor

DEFAULT_EPS: float = default_of("newton_schulz", "eps")
"""Smallest Frobenius norm that is divided by: emerging-optimizers', 1e-7 in its release 0.3."""

SMALLEST_EPS = 1e-38
"""The least that it may be: the reciprocals of smaller ones leave float32."""


def _compute_torch(
    wide: Tensor,
    schedule: tuple[Triple, ...],
    plan: Plan,
    *,
    eps: float,
    reduce: ReduceT | None,
    columns: int,
    out: Tensor | None = None,
) -> Tensor:
    """Do it with our own code; ``out`` is what to write to, if possible, and may be ``wide``."""
    plan = plan.stable(wide.shape[-2])
    tall = wide.stride(-2) < wide.stride(-1)
    if out is not None:
        out = out.mT if tall else out
        out = out if out.dtype == plan.dtype and out.is_contiguous() else None
    x = wide.mT if tall else wide
    # the iterates lie in two places in turn, of which the last one is `out`
    first, spare = (None, out) if plan.products(len(schedule)) % 2 else (out, None)
    x = normalize(x, eps, plan.dtype, reduce, out=first)
    if plan.algorithm == "standard":
        x = iterate_standard(x, schedule, reduce, tall=tall, spare=spare)
    else:
        x = iterate_gram(x, schedule, plan, reduce, columns=columns, tall=tall, spare=spare)
    return x.mT if tall else x


register_backend(
    "torch",
    Backend(
        _compute_torch,
        ("auto", "standard", "gram"),
        distributed=True,
        linear_in_last_step=True,
        writes_out=True,
    ),
)


@dataclass(frozen=True)
class Orthogonalization:
    """Replaces matrices by (about) their nearest semi-orthogonal ones, ``U V^T`` of the SVD.

    What can be decided before the data is decided when it is made, or once for a shape.

    Raises:
        ConfigurationError: If a value is unknown or out of bounds, or the back end is absent or
            has no such algorithm.
        ConfigurationTypeError: If a value is of the wrong kind.
    """

    coefficients: CoefficientsLike = "quintic"  # a set of emerging-optimizers, or your own triples
    steps: int = 5  # number of iterations, at least 1
    algorithm: AlgorithmT = "auto"  # decides by cost and measured accuracy
    precision: PrecisionT = "highest"  # of the products for every input but float64
    eps: float = DEFAULT_EPS  # smallest norm to divide by, at least SMALLEST_EPS
    backend: str = "torch"  # who computes; see :mod:`megatron_eopt.math.backends`
    scale_mode: ScaleModeT = "spectral"  # how an update is scaled by the matrix's shape
    extra_scale_factor: float = 1.0  # a further factor on it
    _schedule: tuple[Triple, ...] = field(init=False, repr=False)
    _plug: Backend = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, PRECISIONS)
        check_number("eps", self.eps, at_least=SMALLEST_EPS)
        plug = get_backend(self.backend)
        plug.algorithm(self.backend, self.algorithm)
        scale_factor(1, 1, self.scale_mode, self.extra_scale_factor)
        object.__setattr__(self, "_schedule", resolve_coefficients(self.coefficients, self.steps))
        object.__setattr__(self, "_plug", plug)

    @torch.no_grad()
    def __call__(
        self,
        x: Tensor,
        *,
        scale: float | tuple[float, ...] = 1.0,
        reduce: ReduceT | None = None,
        whole_shape: tuple[int, int] | None = None,
        in_place: bool = False,
    ) -> Tensor:
        """Return the orthogonal factors of matrices, or ``x``; see :func:`orthogonalize`."""
        shape = (x.shape[-2], x.shape[-1]) if whole_shape is None else whole_shape
        asked = self._plug.algorithm(self.backend, self.algorithm)
        plan = choose_algorithm(shape, x.dtype, self.precision, self._schedule, asked)
        transposed = shape[0] > shape[1]
        wide = x.mT if transposed else x
        if x.ndim > 3:
            wide = wide.flatten(0, -3)
        factors = scale if isinstance(scale, tuple) else (scale,)
        schedule = self._schedule
        if self._plug.linear_in_last_step:
            factor, factors = math.prod(factors), ()
            a, b, c = schedule[-1]
            schedule = (*schedule[:-1], (a * factor, b * factor, c * factor))
        own = {"out": wide} if in_place and self._plug.writes_out else {}
        # "medium" casts its operands itself; the few products that stay float32 are to be exact
        with fp32_matmul_precision("high" if self.precision == "high" else "highest"):
            result = self._plug.compute(
                wide, schedule, plan, eps=self.eps, reduce=reduce, columns=max(shape), **own
            ).to(x.dtype)
        result = (result.mT if transposed else result).reshape(x.shape)
        for factor in factors:
            if factor != 1.0:
                result = result * factor
        if not in_place:
            return result
        return x if place_of(result) == place_of(x) else x.copy_(result)

    @property
    def whole_only(self) -> bool:
        """Whether it cannot compute on pieces of a matrix, whose Gram matrices are summed."""
        return not self._plug.distributed

    @property
    def stack_dtype(self) -> torch.dtype:
        """Dtype in which matrices travel and are stacked.

        Where the products take bfloat16 operands, so do they: half the bytes, the same update at
        every layout, and no rounding that the iteration had not done already. Other packages'
        iterations round by themselves and get float32.
        """
        own = self._plug.linear_in_last_step
        return torch.bfloat16 if own and self.precision == "medium" else torch.float32

    def scale(self, shape: tuple[int, int]) -> float:
        """Return the factor on updates of matrices of this shape."""
        return scale_factor(*shape, self.scale_mode, self.extra_scale_factor)

    def scales(self, shape: tuple[int, int]) -> tuple[float, float]:
        """Return its two factors, of which each rounds where the other packages compute."""
        return scale_factor(*shape, self.scale_mode), self.extra_scale_factor

    def factors_(
        self,
        stack: Tensor,
        reduce: ReduceT | None,
        shape: tuple[int, int],
        scales: tuple[float, ...] = (),
    ) -> None:
        """Replace a stack ``(batch, rows, cols)`` by orthogonal factors times ``scales``, in place.

        With ``reduce`` the ranks share the long side of matrices of this ``shape``. A batch of one
        is computed as a plain matrix.
        """
        whole_shape = None if reduce is None else shape
        matrices = stack[0] if len(stack) == 1 else stack
        self(matrices, scale=scales, reduce=reduce, whole_shape=whole_shape, in_place=True)


def orthogonalize(
    x: Tensor,
    *,
    scale: float | tuple[float, ...] = 1.0,
    reduce: ReduceT | None = None,
    whole_shape: tuple[int, int] | None = None,
    **settings: Any,
) -> Tensor:
    """Replace each matrix by (about) its nearest semi-orthogonal one.

    A batch of equal shapes is one call. Zero, tiny and rank-deficient matrices give finite results;
    inf and nan are the caller's to look for, which would synchronize the host here.

    With ``reduce`` the matrix is cut along its longer side over several ranks, each calls with its
    piece, and only Gram matrices and squared norms travel: one sum per step in the standard
    iteration, one per restart in Gram's, plus one.

    Args:
        x: ``(m, n)`` or ``(..., m, n)``; float64, float32, bfloat16 or float16; any strides; not
            modified.
        scale: A factor on the result, or several one after another. Our own code puts them into the
            last step's coefficients, where they cost neither a pass over the matrix nor another
            rounding.
        reduce: Sums a contiguous tensor over the ranks that share the matrix; may work in place.
        whole_shape: ``(rows, columns)`` of the whole matrix; needed with ``reduce``.
        **settings: Fields of :class:`Orthogonalization`.

    Returns:
        A tensor of the shape and dtype of ``x``, which no gradient flows through.

    Raises:
        ConfigurationError: If an argument's value is out of bounds.
        ConfigurationTypeError: If an argument is of the wrong kind.
    """
    compute = Orthogonalization(**settings)
    return compute(x, scale=scale, reduce=reduce, whole_shape=whole_shape)
