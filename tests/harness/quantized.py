"""Weights in 8 bits on a CPU: a tensor with what megatron-core uses of Transformer Engine's.

Each run of 32 elements of the flattened weight shares a scale, the largest magnitude.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from megatron.core.tensor_parallel.generalized_tensor_parallelism import (
    _gtp_native_fp8_subclass,
    is_gtp_param,
)
from torch import Tensor
from torch.utils._pytree import tree_map_only

BLOCK, LARGEST = 32, 127.0


class QuantizedTensor(Tensor):
    """Bytes with scales; all operations but those on itself see bfloat16 values."""

    _data: Tensor
    _scale: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> "QuantizedTensor":
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self._data, self._scale = data, scale

    @classmethod
    def of(cls, values: Tensor) -> "QuantizedTensor":
        """Return quantized values."""
        flat = values.detach().float().reshape(-1)
        made = cls(
            torch.empty(values.shape, dtype=torch.uint8), torch.zeros(-(-len(flat) // BLOCK))
        )
        made.write(flat, 0, None)
        return made

    def write(self, flat: Tensor | None, start: int, group: Any) -> None:
        """Quantize some elements, after ranks have agreed on the scale of every block."""
        scale = torch.zeros_like(self._scale)
        if flat is not None and len(flat):
            blocks = (start + torch.arange(len(flat))) // BLOCK
            scale.scatter_reduce_(0, blocks, flat.detach().abs(), "amax")
        if group is not None:
            dist.all_reduce(scale, dist.ReduceOp.MAX, group=group)
        self._scale.copy_(scale)
        if flat is not None and len(flat):
            codes = flat.detach() / scale[blocks].clamp(min=1e-30) * LARGEST
            codes = codes.round().to(torch.int8).view(torch.uint8)
            self._data.view(-1)[start : start + len(flat)] = codes

    def dequantize(self) -> Tensor:
        """Return bfloat16 values."""
        codes = self._data.reshape(-1).view(torch.int8).float()
        scale = self._scale.repeat_interleave(BLOCK)[: len(codes)]
        return (codes * scale / LARGEST).view(self._data.shape).bfloat16()

    # what megatron-core calls if it finds no version of Transformer Engine
    from_float8 = dequantize

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._data, args[0]._scale)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].write(args[1].float().reshape(-1), 0, None)
            return args[0]
        plain = tree_map_only(cls, cls.dequantize, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def _map_into(tensor: Tensor, storage: Tensor) -> None:
    """Move the bytes to a buffer of Megatron's."""
    storage.copy_(tensor._data)
    for one in (tensor, tensor.data):
        one._data = storage


def _quantize_shards(
    params: Sequence[Any],
    mains: Sequence[Tensor | None],
    starts: Sequence[int | None],
    group: Any,
    _: Any = None,
) -> None:
    for param, main, start in zip(params, mains, starts, strict=True):
        param.write(main, start or 0, group)


@contextlib.contextmanager
def quantized_weights(*, scaled_in_blocks: bool = False) -> Iterator[None]:
    """Let megatron-core know the stand-in, also as MXFP8 if ``scaled_in_blocks``."""
    values = {
        "HAVE_TE_FP8_TENSOR_CLASS": True,
        "FP8_TENSOR_CLASS": QuantizedTensor,
        "HAVE_TE_MXFP8TENSOR": scaled_in_blocks,
        "_modify_underlying_storage_impl": _map_into,
        "_quantize_param_shard_impl": _quantize_shards,
    }
    with (
        mock.patch.multiple(fp8_utils, **values),
        mock.patch.object(fp8_utils, "MXFP8Tensor", QuantizedTensor, create=True),
    ):
        yield


def quantize_weights(model: torch.nn.Module, names: Sequence[str]) -> None:
    """Replace the weights with one of these words in their name by quantized ones."""
    for path, module in model.named_modules():
        param = module._parameters.get("weight")
        if param is not None and param.dim() == 2 and any(word in path for word in names):
            made = torch.nn.Parameter(QuantizedTensor.of(param))
            vars(made).update(vars(param))
            if is_gtp_param(param):
                # as megatron-core makes an 8-bit weight whose rows are cut
                made.__class__ = _gtp_native_fp8_subclass(type(made))
            exact = param.detach().clone()
            made.get_high_precision_init_val = lambda exact=exact: exact
            made.clear_high_precision_init_val = lambda: None
            module._parameters["weight"] = made
