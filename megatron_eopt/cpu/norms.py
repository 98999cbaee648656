"""Layer norms of torch for Megatron's local layers, under sequence parallelism too.

Without Transformer Engine and Apex the layers get ``WrappedTorchNorm``, which makes torch's
LayerNorm or RMSNorm and refuses sequence parallelism. All that is missing there is a mark: a norm
that sees a part of the sequence has a part of its gradient, and Megatron adds these parts up over
tensor parallelism for parameters whose attribute ``sequence_parallel`` is true.
"""

import copy
from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_eopt.cpu.patches import Patch


def norm_patches() -> list[Patch]:
    """Return the replacement that makes torch's norms under sequence parallelism."""
    plain: Any = WrappedTorchNorm.__new__

    def make(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return plain(cls, config, *args, **kwargs)
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm: torch.nn.Module = plain(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return norm

    return [Patch(WrappedTorchNorm, "__new__", staticmethod(make))]
