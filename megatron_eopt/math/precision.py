"""In which precision the matrix products run."""

from typing import Literal, get_args

import torch

from megatron_eopt.base.errors import ConfigurationTypeError, check_choice

PrecisionT = Literal["highest", "high", "medium"]
"""``highest``: float32; ``high``: float32 storage with TF32 products where the device has them;
``medium``: bfloat16 operands with float32 accumulation."""

PRECISIONS: tuple[PrecisionT, ...] = get_args(PrecisionT)

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def compute_dtype(dtype: torch.dtype, precision: PrecisionT) -> torch.dtype:
    """Return the dtype of the operands of the matrix products.

    float64 stays float64 whatever the precision, so that a float64 call is the reference of the
    others. All other inputs are computed in float32 (highest, high) or bfloat16 (medium).

    Raises:
        ConfigurationError: If the precision is unknown.
        ConfigurationTypeError: If ``dtype`` is not float64, float32, bfloat16 or float16.
    """
    check_choice("precision", precision, PRECISIONS)
    if dtype not in FLOAT_DTYPES:
        rule = "a matrix to orthogonalize must be float64, float32, bfloat16 or float16"
        raise ConfigurationTypeError("dtype", dtype, rule, "Convert it first")
    if dtype == torch.float64:
        return dtype
    return torch.bfloat16 if precision == "medium" else torch.float32
