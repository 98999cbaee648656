"""Which tensors megatron-core's wrappers step in place of the model's parameters."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["main_copies"]

_LISTS = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_float16_groups", "shard_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
)
"""Names of a wrapper's lists of the model's parameters, and of what steps in their place."""


def main_copies(wrapper: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's parameters that have a main copy or a fragment, and that.

    Args:
        wrapper: A ``MegatronOptimizer`` around one torch optimizer.
    """
    for models, mains in _LISTS:
        groups = zip(getattr(wrapper, models, ()), getattr(wrapper, mains, ()), strict=True)
        for model_group, main_group in groups:
            for model, main in zip(model_group, main_group, strict=True):
                if main is not None:
                    yield model, main
