"""The arithmetic on whole matrices: orthogonalize, then scale by the matrix's shape."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationTypeError, check_choice, check_number
from megatron_eopt.math.algorithm import ALGORITHMS, AlgorithmT
from megatron_eopt.math.backends import chunk_size, get_backend
from megatron_eopt.math.coefficients import (
    COEFFICIENT_NAMES,
    CoefficientsLike,
    resolve_coefficients,
)
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.orthogonalize import DEFAULT_EPS, orthogonalize
from megatron_eopt.math.precision import PRECISIONS, PrecisionT
from megatron_eopt.math.scaling import SCALE_MODES, ScaleModeT, scale_factor

__all__ = ["Orthogonalization"]


@dataclass(frozen=True)
class Orthogonalization:
    """Settings of the arithmetic, the same for all matrices of an optimizer.

    Attributes:
        coefficients: Name of a coefficient set, or triples of one's own.
        steps: Newton-Schulz steps.
        scale_mode: How the update is scaled by the matrix's shape.
        extra_scale_factor: A further factor.
        precision: Precision of the matrix products.
        algorithm: Which iteration.
        backend: Whose kernels.
        eps: Smallest norm to divide by.

    Raises:
        ConfigurationError: If a value is unknown or out of bounds, or the back end is absent or
            has no such algorithm.
        ConfigurationTypeError: If a number is of the wrong kind.
    """

    coefficients: CoefficientsLike = "quintic"
    steps: int = 5
    scale_mode: ScaleModeT = "spectral"
    extra_scale_factor: float = 1.0
    precision: PrecisionT = "medium"
    algorithm: AlgorithmT = "auto"
    backend: str = "torch"
    eps: float = DEFAULT_EPS

    def __post_init__(self) -> None:
        check_number("num_ns_steps", self.steps, at_least=1)
        if not isinstance(self.steps, int):
            rule = "must be an integer"
            raise ConfigurationTypeError("num_ns_steps", self.steps, rule, "Give a whole number")
        if isinstance(self.coefficients, str):
            check_choice("coefficient_type", self.coefficients, COEFFICIENT_NAMES)
        resolve_coefficients(self.coefficients, self.steps)
        check_choice("scale_mode", self.scale_mode, SCALE_MODES)
        check_number("extra_scale_factor", self.extra_scale_factor)
        check_choice("fp32_matmul_prec", self.precision, PRECISIONS)
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        get_backend(self.backend).algorithm(self.backend, self.algorithm)
        check_number("ns_eps", self.eps, above=0)

    @property
    def stack_dtype(self) -> torch.dtype:
        """Dtype in which matrices travel and are stacked.

        Where the products take bfloat16 operands, directions are rounded to it before they travel
        and results after the last step: half the bytes, the same update at every layout, and no
        rounding of the result that the iteration had not done already. Other packages' iterations
        round by themselves and get float32.
        """
        own = get_backend(self.backend).linear_in_last_step
        return torch.bfloat16 if own and self.precision == "medium" else torch.float32

    def orthogonal(
        self, stack: Tensor, reduce: ReduceT | None, shape: tuple[int, int], scale: float = 1.0
    ) -> Tensor:
        """Return the orthogonal factors of a stack of matrices, times ``scale``.

        Args:
            stack: ``(batch, rows, cols)``; a batch of one is computed as a plain matrix.
            reduce: Sums over the ranks that share the long side.
            shape: Rows and columns of the whole matrix.
            scale: A factor on the result.
        """
        single = len(stack) == 1
        result = orthogonalize(
            stack[0] if single else stack,
            coefficients=self.coefficients,
            steps=self.steps,
            algorithm=self.algorithm,
            precision=self.precision,
            eps=self.eps,
            backend=self.backend,
            scale=scale,
            reduce=reduce,
            whole_shape=None if reduce is None else shape,
        )
        return result.unsqueeze(0) if single else result

    def scale(self, shape: tuple[int, int]) -> float:
        """Return the factor on updates of matrices of this shape."""
        return scale_factor(*shape, self.scale_mode, self.extra_scale_factor)

    def update(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Replace directions by updates, in place; the engine's callback."""
        scale = self.scale(shape)
        for part in torch.split(stack, chunk_size(stack, stack.dtype, reduce)):
            part.copy_(self.orthogonal(part, reduce, shape, scale))
