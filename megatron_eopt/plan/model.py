"""The stages of an architecture on a layout of ranks, built of megatron-core's parts."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_eopt.base.errors import ConfigurationError, check_integer
from megatron_eopt.plan.architectures import Architecture

__all__ = ["Layout", "build_stage", "check_fits", "initialize", "stage_kinds", "stages"]


@dataclass(frozen=True)
class Layout:
    """How ranks share the work, each size a number of ranks.

    Attributes:
        tensor: Tensor-parallel size.
        pipeline: Pipeline stages.
        data: Data-parallel size of what is no expert's.
        expert: Expert-parallel size.
        expert_tensor: Tensor-parallel size of the experts; ``tensor`` if None, as Megatron has it.
        instances: Of the distributed optimizer: each has all of its state.

    Raises:
        ConfigurationError: If a size is below 1, or sizes do not divide as Megatron asks.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int | None = None
    instances: int = 1

    def __post_init__(self) -> None:
        if self.expert_tensor is None:
            object.__setattr__(self, "expert_tensor", self.tensor)
        for field in dataclasses.fields(self):
            check_integer(field.name, getattr(self, field.name))
        ranks = self._expert_ranks
        _check_divides("expert * expert_tensor", ranks, self.stage_size, "the ranks of a stage")
        _check_divides("instances", self.instances, self.data, "the data-parallel size")
        _check_divides(
            "instances", self.instances, self.expert_data, "the data-parallel size of the experts"
        )

    @property
    def _expert_ranks(self) -> int:
        return self.expert * (self.expert_tensor or 1)

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.data

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.stage_size * self.pipeline

    @property
    def expert_data(self) -> int:
        """Data-parallel size of the experts."""
        return self.stage_size // self._expert_ranks

    def first_rank(self, stage: int) -> int:
        """Return the lowest rank of a pipeline stage."""
        return stage * self.stage_size


def _check_divides(argument: str, size: int, whole: int, words: str) -> None:
    if whole % size:
        rule = f"must divide {words}, {whole}"
        raise ConfigurationError(argument, size, rule, "Change one of them")


def initialize(layout: Layout) -> None:
    """Make megatron-core's process groups, none of them of gloo.

    Args:
        layout: Of as many ranks as the world that this process is in.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        num_distributed_optimizer_instances=layout.instances,
        create_gloo_process_groups=False,
    )


def check_fits(architecture: Architecture, layout: Layout) -> None:
    """Refuse a layout that the architecture cannot be cut by.

    Args:
        architecture: What is to be cut.
        layout: By what.

    Raises:
        ConfigurationError: If layers, heads, inner sizes, experts or the vocabulary do not divide.
    """
    stages(architecture, layout)
    experts, latent = architecture.experts, architecture.latent
    tensor, groups = layout.tensor, architecture.num_query_groups
    # None and 0 are not there to be cut
    cut: dict[str, int | None] = {
        "num_attention_heads": architecture.num_attention_heads,
        "ffn_hidden_size": None if all(architecture.moe_layers) else architecture.ffn_hidden_size,
        "vocab_size": architecture.vocab_size,
    }
    if latent:
        cut["q_lora_rank"] = latent.q_lora_rank
        cut["kv_lora_rank + qk_pos_emb_head_dim"] = latent.kv_lora_rank + latent.qk_pos_emb_head_dim
    elif groups % tensor and tensor % groups:
        rule = f"must divide the tensor-parallel size {tensor}, or be divided by it"
        raise ConfigurationError("num_query_groups", groups, rule, "Change one of them")
    if experts:
        shared, inner = experts.moe_shared_expert_intermediate_size, experts.moe_ffn_hidden_size
        cut["moe_shared_expert_intermediate_size"] = shared
        _check_divides("expert", layout.expert, experts.num_moe_experts, "the number of experts")
        _check_divides("expert_tensor", layout.expert_tensor or 1, inner, "moe_ffn_hidden_size")
    elif layout.expert > 1:
        rule = "must be 1, since the architecture has no experts"
        raise ConfigurationError("expert", layout.expert, rule, "Leave it out")
    for name, size in cut.items():
        _check_divides("tensor", tensor, size or 0, name)


def stages(architecture: Architecture, layout: Layout) -> list[range]:
    """Return which layers each pipeline stage has, counted from 0.

    Where layers do not divide by stages, the last one has what is left by the others.

    Args:
        architecture: Whose layers.
        layout: Its number of stages.

    Raises:
        ConfigurationError: If a stage would have no layer.
    """
    layers, count = architecture.num_layers, layout.pipeline
    each = -(-layers // count)
    if each * (count - 1) >= layers:
        rule = f"must leave a layer for each stage: {layers} layers, {each} in all stages but one"
        way_out = f"Take {-(-layers // each)} stages"
        raise ConfigurationError("pipeline", count, rule, way_out)
    return [range(first, min(first + each, layers)) for first in range(0, layers, each)]


def stage_kinds(architecture: Architecture, layout: Layout) -> list[tuple[int, ...]]:
    """Return the pipeline ranks of equal stages together, in the order of the first of each.

    Stages are equal if they have equal kinds of layers in one order, and the same of embedding and
    output layer.

    Args:
        architecture: What is cut into stages.
        layout: By which stages.

    Raises:
        ConfigurationError: If a stage would have no layer.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for stage, layers in enumerate(stages(architecture, layout)):
        mixed = tuple(architecture.moe_layers[layer] for layer in layers)
        ends = (stage == 0, stage == layout.pipeline - 1)
        kinds.setdefault((*ends, mixed), []).append(stage)
    return [tuple(ranks) for ranks in kinds.values()]


def build_stage(architecture: Architecture, layout: Layout) -> DistributedDataParallel:
    """Build this rank's pipeline stage of a model in bf16, its gradients in fp32.

    It is made of megatron-core's own layers, with a weight for each expert, without values, and
    wrapped for the distributed optimizer. In a dry world it takes no memory.

    Args:
        architecture: What to build.
        layout: What :func:`initialize` was called with.

    Returns:
        The one model chunk of this rank.

    Raises:
        ConfigurationError: If the layout does not fit.
    """
    check_fits(architecture, layout)
    settings = _transformer(architecture, layout)
    spec = get_gpt_decoder_block_spec(
        settings, use_transformer_engine=False, normalization="RMSNorm"
    )
    # with Apex installed, the block's would be one that knows no RMSNorm
    spec.layer_norm = WrappedTorchNorm
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = GPTModel(
            config=settings,
            transformer_layer_spec=spec,
            vocab_size=architecture.vocab_size,
            max_sequence_length=architecture.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not architecture.untied,
            position_embedding_type="rope",
        )
    finally:
        torch.set_default_dtype(before)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        num_distributed_optimizer_instances=layout.instances,
    )
    return DistributedDataParallel(settings, ddp, model)


def _transformer(architecture: Architecture, layout: Layout) -> TransformerConfig:
    gated, last = architecture.gated, stages(architecture, layout)[-1]
    uneven = architecture.num_layers % layout.pipeline > 0
    given: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
        "kv_channels": architecture.kv_channels,
        "add_bias_linear": False,
        "add_qkv_bias": architecture.add_qkv_bias,
        "qk_layernorm": architecture.qk_layernorm,
        "gated_linear_unit": gated,
        "activation_func": torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        "normalization": "RMSNorm",
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "perform_initialization": False,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.tensor > 1,
        "pipeline_model_parallel_size": layout.pipeline,
        "num_layers_in_last_pipeline_stage": len(last) if uneven else None,
    }
    if architecture.experts:
        experts = dataclasses.asdict(architecture.experts)
        every = experts["moe_layer_freq"]
        given |= experts | {
            "moe_layer_freq": every if isinstance(every, int) else list(every),
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": False,
            "expert_model_parallel_size": layout.expert,
            "expert_tensor_parallel_size": layout.expert_tensor,
        }
    if architecture.latent is None:
        return TransformerConfig(**given)
    latent = dataclasses.asdict(architecture.latent)
    return MLATransformerConfig(**given, **latent, rope_type="rope")
