"""In which precision the matrix products run."""

from typing import Literal, get_args

import torch

PrecisionT = Literal["highest", "high", "medium"]
"""``highest``: float32; ``high``: float32 storage with TF32 products where the device has them;
``medium``: bfloat16 operands with float32 accumulation."""

PRECISIONS: tuple[PrecisionT, ...] = get_args(PrecisionT)


def compute_dtype(dtype: torch.dtype, precision: PrecisionT) -> torch.dtype:
    """Return the dtype of the operands of the matrix products.

    float64 stays float64 whatever the precision, so that a float64 call is the reference of the
    others. All other inputs are computed in float32 (highest, high) or bfloat16 (medium).
    """
    if dtype == torch.float64:
        return dtype
    return torch.bfloat16 if precision == "medium" else torch.float32
