"""The stages of an architecture on a layout of ranks, built of megatron-core's parts."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
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

SIZES = {
    "tensor": ("tp", "tensor-model-parallel-size", "ranks that split each weight"),
    "pipeline": ("pp", "pipeline-model-parallel-size", "pipeline stages"),
    "data": ("dp", "data-parallel-size", "ranks that have copies of the model"),
    "expert": ("ep", "expert-model-parallel-size", "ranks that experts are dealt out to"),
    "expert_tensor": ("etp", "expert-tensor-parallel-size", "ranks that split an expert's weight"),
    "instances": ("instances", "num-distributed-optimizer-instances", "copies of the state"),
}
"""Short name, Megatron's flag and meaning of each field of a :class:`Layout`."""


@dataclass(frozen=True)
class Layout:
    """How ranks share the work, each size a number of ranks.

    Raises:
        ConfigurationError: If a size is below 1.
    """

    tensor: int = 1  # tensor-parallel size
    pipeline: int = 1  # pipeline stages
    data: int = 1  # data-parallel size of what is no expert's
    expert: int = 1  # expert-parallel size
    # tensor-parallel size of the experts; ``tensor`` if None, as Megatron has it
    expert_tensor: int | None = None
    instances: int = 1  # of the distributed optimizer: each has all of its state

    def __post_init__(self) -> None:
        if self.expert_tensor is None:
            object.__setattr__(self, "expert_tensor", self.tensor)
        for field in dataclasses.fields(self):
            check_integer(field.name, getattr(self, field.name))

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tensor * self.data

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.stage_size * self.pipeline

    def first_rank(self, stage: int) -> int:
        """Return the lowest rank of a pipeline stage."""
        return stage * self.stage_size


def stages(architecture: Architecture, layout: Layout) -> list[range]:
    """Return which layers each pipeline stage has, counted from 0.

    Where layers do not divide by stages, the last one has what is left by the others.

    Raises:
        ConfigurationError: If a stage would have no layer.
    """
    layers, count = architecture.fields["num_layers"], layout.pipeline
    each = -(-layers // count)
    if each * (count - 1) >= layers:
        rule = f"must leave a layer for each stage: {layers} layers, {each} in all stages but one"
        raise ConfigurationError("pipeline", count, rule, "Take fewer stages")
    return [range(first, min(first + each, layers)) for first in range(0, layers, each)]


def stage_kinds(architecture: Architecture, layout: Layout) -> list[tuple[int, ...]]:
    """Return the pipeline ranks of equal stages together, in the order of the first of each.

    Stages are equal if they have equal kinds of layers in one order, and the same of embedding and
    output layer.

    Raises:
        ConfigurationError: If a stage would have no layer.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for stage, layers in enumerate(stages(architecture, layout)):
        mixed = tuple(architecture.moe_layers[layer] for layer in layers)
        ends = (stage == 0, stage == layout.pipeline - 1)
        kinds.setdefault((*ends, mixed), []).append(stage)
    return [tuple(ranks) for ranks in kinds.values()]


def build_stage(
    architecture: Architecture, layout: Layout, *, overlaps: bool = False
) -> DistributedDataParallel:
    """Make megatron-core's process groups, and build this rank's pipeline stage of a model.

    It is made of megatron-core's own layers in bf16, its gradients in fp32, with a weight for each
    expert, without values, and wrapped for the distributed optimizer. In a dry world it takes no
    memory.

    Args:
        architecture: What to build.
        layout: Of as many ranks as the world that this process is in.
        overlaps: Whether gradients are reduced, and parameters gathered, bucket by bucket.

    Returns:
        The one model chunk of this rank.

    Raises:
        ConfigurationError: If megatron-core cannot cut the architecture so.
    """
    try:
        return _built(architecture, layout, overlaps)
    except (AssertionError, RuntimeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        rule = f"does not fit {architecture.name}: {reason}"
        raise ConfigurationError("layout", layout, rule, "Choose other sizes") from error


def _built(architecture: Architecture, layout: Layout, overlaps: bool) -> DistributedDataParallel:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        num_distributed_optimizer_instances=layout.instances,
        create_gloo_process_groups=False,
    )
    config = transformer_config(architecture, layout)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    # with Apex installed, the block's would be one that knows no RMSNorm
    spec.layer_norm = WrappedTorchNorm
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = GPTModel(
            config=config,
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
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
        num_distributed_optimizer_instances=layout.instances,
    )
    return DistributedDataParallel(config, ddp, model)


def transformer_config(architecture: Architecture, layout: Layout) -> TransformerConfig:
    """Return megatron-core's configuration of an architecture's layers."""
    fields, last = architecture.fields, stages(architecture, layout)[-1]
    gated, uneven = fields.get("gated_linear_unit"), fields["num_layers"] % layout.pipeline > 0
    given: dict[str, Any] = {
        "add_bias_linear": False,
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
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }
    if "kv_lora_rank" in fields:
        return MLATransformerConfig(**given, **fields, rope_type="rope")
    return TransformerConfig(**given, **fields)


def train_flops(architecture: Architecture, tokens: int) -> float:
    """Return the operations of forward and backward pass over so many tokens."""
    # this loads what must not be loaded before the device is chosen
    from megatron.training.training import num_floating_point_operations

    layers = vars(transformer_config(architecture, Layout()))
    flags = {
        "seq_length": architecture.seq_length,
        "padded_vocab_size": architecture.vocab_size,
        "swiglu": layers["gated_linear_unit"],
        "num_experts": layers["num_moe_experts"],
        "group_query_attention": not layers["multi_latent_attention"],
        "hybrid_layer_pattern": None,
    }
    args = SimpleNamespace(**layers | flags)
    return float(num_floating_point_operations(args, tokens / architecture.seq_length))
