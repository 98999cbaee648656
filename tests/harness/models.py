"""Small models of real megatron-core parts, their data, and a training step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.distributed.torch_fully_sharded_data_parallel_config import (
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

SEQUENCE_LENGTH = 16
VOCABULARY = 32
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
    "apply_rope_fusion": False,
    "normalization": "RMSNorm",
}
"""Sizes of multi-latent attention; keys and values have different ones."""


@dataclass(frozen=True)
class Batch:
    """Token ids, their successors, and positions; each (batch, sequence), int64."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor


SIZES: dict[str, tuple[str, Any]] = {
    "layers": ("num_layers", 2),
    "hidden": ("hidden_size", 32),
    "heads": ("num_attention_heads", 4),
    "query_groups": ("num_query_groups", None),
    "experts": ("num_moe_experts", None),
    "gated": ("gated_linear_unit", False),
    "bias": ("add_bias_linear", False),
}
"""Short names of fields of ``TransformerConfig``, and what they are unless given."""


def tiny_gpt(
    *,
    vocabulary: int = VOCABULARY,
    position_embedding: Literal["learned_absolute", "rope"] = "learned_absolute",
    untied: bool = True,
    dtype: torch.dtype = torch.float32,
    virtual_stage: int | None = None,
    latent: bool = False,
    hybrid: bool = False,
    **sizes: Any,
) -> torch.nn.Module:
    """Build this rank's part of a GPT on its device, in fp32 or wrapped for a 16-bit ``dtype``.

    ``latent`` attention is multi-latent. A ``hybrid`` model has attention and MLPs as layers of
    their own. ``sizes`` are those of :data:`SIZES`, and further fields of ``TransformerConfig``.
    """
    if latent:
        sizes = {"multi_latent_attention": True} | LATENT | sizes
    config = _config(sizes, dtype)
    layers, experts = config.num_layers, config.num_moe_experts
    stage = {"ignore_virtual": False, "vp_stage": virtual_stage}
    fields: dict[str, Any] = {
        "vocab_size": vocabulary,
        "max_sequence_length": SEQUENCE_LENGTH,
        "pre_process": parallel_state.is_pipeline_first_stage(**stage),
        "post_process": parallel_state.is_pipeline_last_stage(**stage),
        "share_embeddings_and_output_weights": not untied,
        "position_embedding_type": position_embedding,
        "vp_stage": virtual_stage,
    }
    model: torch.nn.Module
    if hybrid:
        config.num_layers, config.is_hybrid_model = 2 * layers, True
        block = ("+" if latent else "*") + ("E" if experts else "-")
        fields["hybrid_layer_pattern"] = block * layers
        model = HybridModel(config, hybrid_stack_spec, **fields)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=experts, multi_latent_attention=latent, normalization=config.normalization
        )
        model = GPTModel(config, spec, **fields)
    if len({param.device for param in model.parameters()}) > 1:
        # as the trainer does: norms and position embeddings of torch are made on the host
        model.cuda(torch.cuda.current_device())
    if dtype != torch.float32:
        model = Float16Module(config, model)
    return model


def _config(sizes: dict[str, Any], dtype: torch.dtype) -> TransformerConfig:
    given = {name: sizes.pop(short, default) for short, (name, default) in SIZES.items()} | sizes
    functions = torch.nn.functional
    fields: dict[str, Any] = {
        "ffn_hidden_size": 4 * given["hidden_size"],
        "activation_func": functions.silu if given["gated_linear_unit"] else functions.gelu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "gtp_weight_remat_size": parallel_state.get_gtp_weight_remat_world_size(),
        "expert_gtp_weight_remat_size": parallel_state.get_expert_gtp_weight_remat_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": (
            parallel_state.get_virtual_pipeline_model_parallel_world_size()
        ),
    }
    if given["num_moe_experts"] is not None:
        fields |= {
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            # without it Megatron does not train experts under tensor parallelism
            "sequence_parallel": fields["tensor_model_parallel_size"] > 1,
        }
    cls = MLATransformerConfig if "multi_latent_attention" in given else TransformerConfig
    return cls(**(fields | given))


def wrap_ddp(model: torch.nn.Module, **flags: Any) -> DistributedDataParallel:
    """Wrap a model of :func:`tiny_gpt`; ``flags`` are fields of DistributedDataParallelConfig."""
    config = get_model_config(model)
    ddp_config = DistributedDataParallelConfig(**({"grad_reduce_in_fp32": True} | flags))
    wrapped = DistributedDataParallel(config, ddp_config, model)
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = wrapped.no_sync
    return wrapped


def wrap_fsdp2(model: torch.nn.Module) -> TorchFullyShardedDataParallel:
    config = TorchFullyShardedDataParallelConfig()
    return TorchFullyShardedDataParallel(get_model_config(model), config, model)


def synthetic_batch(
    seed: int, *, size: int = 2, vocabulary: int = VOCABULARY, length: int = SEQUENCE_LENGTH
) -> Batch:
    """Return sequences that count upwards from random starts, so that they can be learned."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(vocabulary, (size, 1), generator=generator)
    counted = (starts + torch.arange(length + 1)) % vocabulary
    positions = torch.arange(length).expand(size, -1)
    return Batch(counted[:, :-1].contiguous(), counted[:, 1:].contiguous(), positions)


def _forward_step(data: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(data)
    losses = model(batch.tokens, batch.positions, None, labels=batch.labels)

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        # cloned, because the schedule divides the loss in place by the number of microbatches
        return loss, {"loss": loss.detach().clone()}

    return losses, loss_of


def forward_backward(
    models: list[DistributedDataParallel], batches: list[Batch], *, forward_only: bool = False
) -> float | None:
    """Zero the gradients and run Megatron's schedule over one microbatch per entry of ``batches``.

    Returns the mean loss of this rank's microbatches, on the last pipeline stage; None on others.
    """
    for model in models:
        model.zero_grad_buffer()
    iterators = [iter(batches) for _ in models]
    reports = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iterators if len(models) > 1 else iterators[0],
        model=models if len(models) > 1 else models[0],
        num_microbatches=len(batches),
        seq_length=batches[0].tokens.shape[1],
        micro_batch_size=batches[0].tokens.shape[0],
        forward_only=forward_only,
    )
    if not reports:
        return None
    return sum(float(report["loss"]) for report in reports) / len(reports)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare tensors bit by bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def copies_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all weights by name."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def train_step(
    models: list[DistributedDataParallel], optimizer: Any, batches: list[Batch]
) -> float | None:
    """Do one step; return the loss before it, on the last pipeline stage (None on others)."""
    optimizer.zero_grad()
    loss = forward_backward(models, batches)
    optimizer.step()
    return loss
