"""Weight rematerialization (GTP) on a CPU: what megatron-core takes from Transformer Engine for it.

Megatron's own local layers cut their weights over the group ``gtp_remat``, gather them before each
product and scatter their gradients. They need no layer of Transformer Engine, only a few functions,
which stand here. Prefetching is off, because collectives do not overlap with anything on a CPU.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.cpu.patches import Patch

try:
    from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp
    from megatron.core.tensor_parallel import gtp_api
except ImportError:  # older releases of megatron-core
    gtp = gtp_api = None


class _Quantized:
    """The type of quantized tensors, of which there are none."""


def rematerialization_patches() -> list[Patch]:
    """Return the patches; none if Transformer Engine is there, or megatron-core knows no GTP."""
    if gtp is None or gtp.HAVE_TE:
        return []
    # megatron-core asks ``isinstance`` with these types
    quantized = ("QuantizedTensor", "MXFP8TensorStorage", "NVFP4TensorStorage")
    values: dict[str, Any] = {
        "HAVE_TE": True,
        "gather_along_first_dim": _gather,
        "reduce_scatter_along_first_dim": _reduce_scatter,
        "in_fp8_activation_recompute_phase": lambda: False,
        "get_dummy_wgrad": _empty_gradient,
        **dict.fromkeys(quantized, _Quantized),
    }
    return [
        *(Patch(gtp, name, value) for name, value in values.items()),
        Patch(gtp.GTP_CONFIG, "weight_prefetch", False),
        Patch(gtp.GTP_CONFIG, "async_reduction", False),
        Patch(gtp_api, "HAVE_GTP", True),
        Patch(gtp_api, "wrap_module_params_gtp", _keeping_experts(gtp.wrap_module_params_gtp)),
    ]


def _gather(
    shard: Tensor, group: Any, *, output_tensor: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Return all rows, gathered from the ranks of a group."""
    if output_tensor is None:
        output_tensor = shard.new_empty(shard.shape[0] * group.size(), *shard.shape[1:])
    dist.all_gather_into_tensor(output_tensor, shard.detach(), group=group)
    return output_tensor, None


def _reduce_scatter(
    grad: Tensor, group: Any, *, output: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Return this rank's rows of the sum over a group."""
    if output is None:
        output = grad.new_empty(grad.shape[0] // group.size(), *grad.shape[1:])
    dist.reduce_scatter_tensor(output, grad.contiguous(), group=group)
    return output, None


def _empty_gradient(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@around
def _keeping_experts(
    plain: Function, module: Any, weight_names: Any, *args: Any, **kwargs: Any
) -> None:
    """Cut weights, and keep the mark of experts, which megatron-core loses in local layers."""
    marks = [getattr(getattr(module, name, None), "allreduce", None) for name in weight_names]
    plain(module, weight_names, *args, **kwargs)
    for name, mark in zip(weight_names, marks, strict=True):
        if mark is not None:
            getattr(module, name).allreduce = mark
