"""Build one rank's pipeline stage of an architecture from megatron-core's layers."""

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
from megatron_eopt.tools.plan.architectures import Architecture

SIZES = {
    "tensor": ("tp", "tensor-model-parallel-size", "tensor-parallel size"),
    "pipeline": ("pp", "pipeline-model-parallel-size", "pipeline-parallel size"),
    "data": ("dp", "data-parallel-size", "data-parallel size"),
    "expert": ("ep", "expert-model-parallel-size", "expert-parallel size"),
    "expert_tensor": ("etp", "expert-tensor-parallel-size", "tensor-parallel size of experts"),
    "instances": ("instances", "num-distributed-optimizer-instances", "copies of optimizer state"),
}
"""Short name, Megatron's flag and help text of each field of :class:`ParallelLayout`."""


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel groups; at least 1 each."""

    tensor: int = 1  # tensor-parallel size
    pipeline: int = 1  # pipeline-parallel size
    data: int = 1  # data-parallel size of all weights but those of experts
    expert: int = 1  # expert-parallel size
    expert_tensor: int | None = None  # tensor-parallel size of experts; None means ``tensor``
    instances: int = 1  # of the distributed optimizer; each has all of the optimizer state

    def __post_init__(self) -> None:
        if self.expert_tensor is None:
            object.__setattr__(self, "expert_tensor", self.tensor)
        for field in dataclasses.fields(self):
            check_integer(field.name, getattr(self, field.name))

    def __str__(self) -> str:
        sizes = {short: getattr(self, field) for field, (short, *_) in SIZES.items()}
        return ", ".join(f"{short} {size}" for short, size in sizes.items() if short != "instances")

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


def stages(architecture: Architecture, layout: ParallelLayout) -> list[range]:
    """Return the layers of each pipeline stage, counted from 0.

    If the layers do not divide evenly, the last stage has fewer than the others.

    Raises:
        ConfigurationError: If a stage would have no layer.
    """
    layers, count = architecture.fields["num_layers"], layout.pipeline
    each = -(-layers // count)
    if each * (count - 1) >= layers:
        rule = f"must leave a layer for each stage, but {layers} layers are split {each} per stage"
        raise ConfigurationError("pipeline", count, rule, "Choose fewer stages")
    return [range(first, min(first + each, layers)) for first in range(0, layers, each)]


def stage_kinds(architecture: Architecture, layout: ParallelLayout) -> list[tuple[int, ...]]:
    """Group equal pipeline stages: return a tuple of their pipeline ranks for each kind.

    Stages are equal if they have the same kinds of layers in the same order, and agree on whether
    they have the embedding and the output layer.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for stage, layers in enumerate(stages(architecture, layout)):
        mixed = tuple(architecture.moe_layers[layer] for layer in layers)
        ends = (stage == 0, stage == layout.pipeline - 1)
        kinds.setdefault((*ends, mixed), []).append(stage)
    return [tuple(ranks) for ranks in kinds.values()]


def build_stage(
    architecture: Architecture,
    layout: ParallelLayout,
    *,
    overlaps: bool = False,
    layer_wise: bool = False,
) -> DistributedDataParallel:
    """Initialize megatron-core's process groups and build this rank's only model chunk.

    Weights are uninitialized bfloat16, one per expert, and gradients are float32. The distributed
    optimizer is assumed. In a ``dry_world``, the stage uses no memory.

    Args:
        architecture: The model.
        layout: The parallel sizes; their number of ranks must be the world size.
        overlaps: Whether gradients are reduced and parameters gathered bucket by bucket.
        layer_wise: Whether buffers are for megatron-core's own layer-wise optimizer.

    Raises:
        ConfigurationError: If megatron-core does not support the architecture at this layout.
    """
    try:
        return _built(architecture, layout, overlaps, layer_wise)
    except (AssertionError, RuntimeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        rule = f"does not fit {architecture.name}: {reason}"
        hint = "Choose other parallel sizes, or correct the model's flags"
        raise ConfigurationError("layout", layout, rule, hint) from error


def _built(
    architecture: Architecture, layout: ParallelLayout, overlaps: bool, layer_wise: bool
) -> DistributedDataParallel:
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
    # with Apex installed, megatron-core would choose a norm that does not support RMSNorm
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
    if not layer_wise:
        return DistributedDataParallel(config, ddp, model)
    # this import must come after the device is chosen
    from megatron.training.training import wrap_model_chunks_with_ddp

    wrapped: list[DistributedDataParallel] = wrap_model_chunks_with_ddp(
        [model], config, ddp, use_layer_wise_distributed_optimizer=True
    )
    return wrapped[0]


def transformer_config(architecture: Architecture, layout: ParallelLayout) -> TransformerConfig:
    """Return megatron-core's configuration of an architecture at a layout."""
    fields, last = architecture.fields, stages(architecture, layout)[-1]
    gated, uneven = fields.get("gated_linear_unit"), fields["num_layers"] % layout.pipeline > 0
    # what a plan does not ask for is off or plain, since it needs no kernels of other packages
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
    """Return the FLOPs of the forward and backward pass over ``tokens`` tokens."""
    # this import must come after the device is chosen
    from megatron.training.training import num_floating_point_operations

    sequences = tokens / architecture.seq_length
    return float(num_floating_point_operations(trainer_args(architecture), sequences))


def least_bytes(architecture: Architecture, layout: ParallelLayout) -> float:
    """Return about how many bytes the weights and gradients of the fullest rank take."""
    # this import must come after the device is chosen
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    args = trainer_args(architecture)
    for field, (_, flag, _) in SIZES.items():
        setattr(args, flag.replace("-", "_"), getattr(layout, field))
    # optimizer state on endlessly many ranks takes no memory of each
    args.data_parallel_size = args.world_size = 2**60
    return float(compute_weight_and_optimizer_memory(args))


def trainer_args(architecture: Architecture) -> SimpleNamespace:
    """Return Megatron's arguments of a model, as far as its formulas need them."""
    layers = vars(transformer_config(architecture, ParallelLayout()))
    flags = {
        "seq_length": architecture.seq_length,
        "padded_vocab_size": architecture.vocab_size,
        "swiglu": layers["gated_linear_unit"],
        "num_experts": layers["num_moe_experts"],
        "group_query_attention": not layers["multi_latent_attention"],
        "untie_embeddings_and_output_weights": architecture.untied,
        "use_distributed_optimizer": True,
        "hybrid_layer_pattern": None,
    }
    return SimpleNamespace(**layers | flags)
