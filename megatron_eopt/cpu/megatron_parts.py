"""Parts of Megatron that lack on a CPU only what is said or copied here.

* Multi-latent attention has values of another width than keys. Megatron's local attention computes
  with any widths, but takes them as arguments in Transformer Engine's class only; the local one
  flattens heads as if values were as wide as ``kv_channels``.
* Without Transformer Engine and Apex, layers get ``WrappedTorchNorm``, which makes torch's
  LayerNorm or RMSNorm and refuses sequence parallelism. All that is missing there is a mark: a
  norm that sees a part of the sequence has a part of its gradient, and Megatron adds these parts up
  over tensor parallelism for parameters whose attribute ``sequence_parallel`` is true.
* The persistent worker of asynchronous checkpoints gets tensors by their memory. Those of a GPU are
  copied to the host before training goes on; those of a CPU would be written as training changes
  them meanwhile.
* Megatron-FSDP lets NCCL multiply gradients while it sums them.
"""

import copy
import functools
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.utils._pytree import tree_map_only

from megatron_eopt.base.upstream import dataset_helpers_to_skip
from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.cpu.patches import Patch


def megatron_patches() -> list[Patch]:
    """Return the replacements of these parts, and of the data set helpers' compilation."""
    patches = [
        Patch(DotProductAttention, "__init__", _with_widths(DotProductAttention.__init__)),
        Patch(WrappedTorchNorm, "__new__", staticmethod(_marking(WrappedTorchNorm.__new__))),
        Patch(
            PersistentAsyncCaller,
            "schedule_async_call",
            _handing_over_copies(PersistentAsyncCaller.schedule_async_call),
        ),
        Patch(
            param_and_grad_buffer,
            "gradient_reduce_preprocessing",
            _multiplying_first(param_and_grad_buffer.gradient_reduce_preprocessing),
        ),
    ]
    # where they cannot be built and are not needed
    if (helpers := dataset_helpers_to_skip()) is not None:
        patches.append(Patch(helpers, "compile_helpers", lambda: None))
    return patches


@around
def _with_widths(
    plain: Function,
    self: Any,
    *args: Any,
    k_channels: int | None = None,
    v_channels: int | None = None,
    **kwargs: Any,
) -> None:
    plain(self, *args, **kwargs)
    if v_channels is not None:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


@around
def _marking(plain: Function, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    if not config.sequence_parallel:
        return plain(cls, config, *args, **kwargs)
    alone = copy.copy(config)
    alone.sequence_parallel = False
    norm: torch.nn.Module = plain(cls, alone, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
    return norm


@around
def _handing_over_copies(plain: Function, self: Any, async_req: Any) -> None:
    plain(self, with_copies(async_req))


def with_copies(request: Any) -> Any:
    """Return an asynchronous request to save whose tensors are copies."""
    # the arguments and what stages them hold the same
    copied = functools.cache(lambda tensor: tensor.detach().clone())

    def copies(arguments: Any) -> Any:
        return tree_map_only(torch.Tensor, copied, arguments)

    stage = request.preload_fn
    if stage is not None:
        stage = functools.partial(stage.func, *copies(stage.args), **copies(stage.keywords))
    return request._replace(async_fn_args=copies(request.async_fn_args), preload_fn=stage)


@around
def _multiplying_first(plain: Function, grad_data: Any, factor: Any, ddp_config: Any) -> Any:
    unfused = copy.copy(ddp_config)
    unfused.gradient_reduce_div_fusion = False
    return plain(grad_data, factor, unfused)
