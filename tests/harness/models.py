"""Small models of real megatron-core parts, their data, and a training step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
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


def tiny_gpt(
    *,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    query_groups: int | None = None,
    gated: bool = False,
    experts: int | None = None,
    vocabulary: int = VOCABULARY,
    sequence: int = SEQUENCE_LENGTH,
    position_embedding: Literal["learned_absolute", "rope"] = "learned_absolute",
    untied: bool = True,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    virtual_stage: int | None = None,
    latent: bool = False,
    hybrid: bool = False,
    **overrides: Any,
) -> torch.nn.Module:
    """Build this rank's part of a GPT on its device, in fp32 or wrapped for a 16-bit ``dtype``.

    Args:
        layers: Transformer layers of the whole model.
        hidden: Hidden size; the feed-forward size is four times that.
        heads: Attention heads.
        query_groups: Groups of grouped-query attention; one per head if None.
        gated: Whether the MLP is gated (SwiGLU).
        experts: Number of experts of the MoE layers; a dense MLP if None.
        vocabulary: Rows of the embedding.
        sequence: Length of the longest sequences.
        position_embedding: Kind of position embedding.
        untied: Whether the output layer has a weight of its own.
        bias: Whether linear layers have biases.
        dtype: Data type of the parameters.
        virtual_stage: Index of the model chunk with an interleaved pipeline.
        latent: Whether attention is multi-latent.
        hybrid: Whether to build a HybridModel, whose attention and MLPs are layers of their own.
        overrides: Further fields of ``TransformerConfig``.
    """
    if latent:
        overrides = {"multi_latent_attention": True} | LATENT | overrides
    config = _config(layers, hidden, heads, query_groups, gated, experts, bias, dtype, overrides)
    first, last = (
        is_stage(ignore_virtual=False, vp_stage=virtual_stage)
        for is_stage in (
            parallel_state.is_pipeline_first_stage,
            parallel_state.is_pipeline_last_stage,
        )
    )
    fields: dict[str, Any] = {
        "vocab_size": vocabulary,
        "max_sequence_length": sequence,
        "pre_process": first,
        "post_process": last,
        "share_embeddings_and_output_weights": not untied,
        "position_embedding_type": position_embedding,
        "vp_stage": virtual_stage,
    }
    model: torch.nn.Module
    if hybrid:
        config.num_layers, config.is_hybrid_model = 2 * layers, True
        block = ("+" if latent else "*") + ("E" if experts else "-")
        model = HybridModel(
            config, hybrid_stack_spec, hybrid_layer_pattern=block * layers, **fields
        )
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


def _config(
    layers: int,
    hidden: int,
    heads: int,
    query_groups: int | None,
    gated: bool,
    experts: int | None,
    bias: bool,
    dtype: torch.dtype,
    overrides: dict[str, Any],
) -> TransformerConfig:
    fields: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": heads,
        "num_query_groups": query_groups,
        "add_bias_linear": bias,
        "gated_linear_unit": gated,
        "activation_func": torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": (
            parallel_state.get_virtual_pipeline_model_parallel_world_size()
        ),
    }
    if experts is not None:
        fields |= {
            "num_moe_experts": experts,
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            # without it Megatron does not train experts under tensor parallelism
            "sequence_parallel": fields["tensor_model_parallel_size"] > 1,
        }
    cls = MLATransformerConfig if "multi_latent_attention" in overrides else TransformerConfig
    return cls(**(fields | overrides))


def wrap_ddp(model: torch.nn.Module, **flags: Any) -> DistributedDataParallel:
    """Wrap a model of :func:`tiny_gpt`; ``flags`` are fields of DistributedDataParallelConfig.

    Gradients are accumulated in fp32 unless the flags say otherwise.
    """
    config = get_model_config(model)
    ddp_config = DistributedDataParallelConfig(**({"grad_reduce_in_fp32": True} | flags))
    wrapped = DistributedDataParallel(config, ddp_config, model)
    config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = wrapped.no_sync
    return wrapped


def synthetic_batch(
    seed: int, *, size: int = 2, vocabulary: int = VOCABULARY, length: int = SEQUENCE_LENGTH
) -> Batch:
    """Return ``size`` sequences that count upwards from random starts, so that they can be learned.

    Args:
        seed: Decides the starts; the same batch on every rank.
        size: Sequences.
        vocabulary: Tokens are smaller than this.
        length: Tokens of a sequence.
    """
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
    """Zero the gradients, run Megatron's schedule over one microbatch per entry of ``batches``.

    The gradients are reduced as ``finalize_model_grads`` does.

    Returns:
        The mean loss of this rank's microbatches, on the last pipeline stage; None on others.
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


def train_step(
    models: list[DistributedDataParallel], optimizer: Any, batches: list[Batch]
) -> float | None:
    """Do one step; return the loss before it, on the last pipeline stage (None on others)."""
    optimizer.zero_grad()
    loss = forward_backward(models, batches)
    optimizer.step()
    return loss
