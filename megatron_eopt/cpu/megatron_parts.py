"""Small patches that make parts of Megatron work on a CPU.

* Attention: in multi-latent attention, values and keys have different widths. Megatron's local
  attention assumes that values are ``kv_channels`` wide; the patch passes it the real width.
* Latent keys with a norm beside queries of full rank, as in Moonlight: Megatron's local layers ask
  for a norm of the queries too, which raises an error. The patch leaves the queries' norm out.
* Norms: without Transformer Engine and Apex, layers use ``WrappedTorchNorm``, which raises an error
  with sequence parallelism. The patch sets the attribute ``sequence_parallel`` on its parameters,
  so that Megatron sums their gradients over tensor-parallel ranks.
* Asynchronous checkpoints: the persistent worker shares CPU tensors' memory, so training would
  change them while it writes. The patch hands it copies.
* Megatron-FSDP: NCCL can scale gradients while it sums them, but gloo cannot. The patch scales them
  first. From megatron-core 0.20 on, buffers of the second version ask for the CUDA stream that
  allocated them. The patch gives them the stand-in of a stream.
"""

import copy
import functools
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental import DBuffer
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.utils._pytree import tree_map_only

from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.cpu.patches import Patch
from megatron_eopt.megatron_core.upstream import dataset_helpers_to_skip


def megatron_patches() -> list[Patch]:
    """Return these patches, and one that skips compiling the dataset helpers."""
    patches = [
        Patch(DotProductAttention, "__init__", _with_widths(DotProductAttention.__init__)),
        Patch(QKNormConfigResolver, "resolve", _with_full_queries(QKNormConfigResolver.resolve)),
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
    if "allocation_stream" in DBuffer.__annotations__:
        patches.append(Patch(DBuffer, "__init__", _on_a_stream(DBuffer.__init__)))
    # skipped if they cannot be built, because they come compiled
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
        # ``DotProductAttention`` reshapes its output to this width
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


@around
def _with_full_queries(plain: Function, self: Any) -> Any:
    config, submodules = self.config, self.submodules
    is_other = self.has_q_lora or self.is_dsa or config.qk_l2_norm
    if is_other or not config.qk_layernorm or submodules.kv_layernorm in (None, IdentityOp):
        return plain(self)
    names = ("linear_q_proj", "linear_kv_up_proj", "kv_layernorm")
    given = {name: getattr(submodules, name) for name in names}
    return self._result(**given, q_layernorm=IdentityOp, linear_q_up_proj=IdentityOp)


@around
def _marking(plain: Function, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    if not config.sequence_parallel:
        return plain(cls, config, *args, **kwargs)
    alone = copy.copy(config)
    # the check that raises looks at this copy, and the module keeps no configuration
    alone.sequence_parallel = False
    norm: torch.nn.Module = plain(cls, alone, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
    return norm


@around
def _handing_over_copies(plain: Function, self: Any, async_req: Any) -> None:
    plain(self, with_copies(async_req))


def with_copies(request: Any) -> Any:
    """Return an asynchronous save request with copies of its tensors."""
    # cached, because the arguments and the preload function share tensors
    copied = functools.cache(lambda tensor: tensor.detach().clone())

    def copies(arguments: Any) -> Any:
        return tree_map_only(torch.Tensor, copied, arguments)

    stage = request.preload_fn
    if stage is not None:
        stage = functools.partial(stage.func, *copies(stage.args), **copies(stage.keywords))
    return request._replace(async_fn_args=copies(request.async_fn_args), preload_fn=stage)


@around
def _on_a_stream(plain: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    plain(self, *args, **kwargs)
    self.allocation_stream = torch.cuda.current_stream()


@around
def _multiplying_first(plain: Function, grad_data: Any, factor: Any, ddp_config: Any) -> Any:
    unfused = copy.copy(ddp_config)
    # otherwise the result is a reduce operation of NCCL's that also multiplies
    unfused.gradient_reduce_div_fusion = False
    return plain(grad_data, factor, unfused)
