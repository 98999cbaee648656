"""Multi-latent attention on Megatron's local layers: values of another width than keys.

Megatron's local attention computes with any widths, but only Transformer Engine's takes them as
arguments; the local one flattens heads as if values were as wide as ``kv_channels``.
"""

import functools
from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_eopt.cpu.patches import Patch


def attention_patches() -> list[Patch]:
    """Return the replacement that takes the widths of keys and values."""
    plain: Any = DotProductAttention.__init__

    @functools.wraps(plain)
    def init(
        self: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        plain(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return [Patch(DotProductAttention, "__init__", init)]
