"""In which precision the matrix products run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from megatron_eopt.base.errors import ConfigurationTypeError, check_choice

PrecisionT = Literal["highest", "high", "medium"]
"""``highest``: float32; ``high``: float32 storage with TF32 products where the device has them;
``medium``: bfloat16 operands with float32 accumulation."""

PRECISIONS: tuple[PrecisionT, ...] = get_args(PrecisionT)

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_precision(precision: str) -> None:
    """Raise a ConfigurationError unless ``precision`` is one of :data:`PrecisionT`."""
    check_choice("precision", precision, PRECISIONS)


def compute_dtype(dtype: torch.dtype, precision: PrecisionT) -> torch.dtype:
    """Return the dtype of the operands of the matrix products.

    float64 stays float64 whatever the precision, so that a float64 call is the reference of the
    others. All other inputs are computed in float32 (highest, high) or bfloat16 (medium).

    Raises:
        ConfigurationTypeError: If ``dtype`` is not float64, float32, bfloat16 or float16.
    """
    check_precision(precision)
    if dtype not in FLOAT_DTYPES:
        raise ConfigurationTypeError(
            "dtype",
            dtype,
            "a matrix to orthogonalize must be float64, float32, bfloat16 or float16",
            "Convert it first",
        )
    if dtype == torch.float64:
        return dtype
    return torch.bfloat16 if precision == "medium" else torch.float32


@contextmanager
def matmul_precision(precision: PrecisionT) -> Iterator[None]:
    """Run float32 products at this precision; the process-wide setting returns on any exit.

    ``medium`` casts its operands itself and asks nothing of torch but exact float32 for the few
    products that stay float32.
    """
    check_precision(precision)
    wanted = "high" if precision == "high" else "highest"
    before = torch.get_float32_matmul_precision()
    if before == wanted:
        yield
        return
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
