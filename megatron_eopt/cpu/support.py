"""Configurations that need a GPU, refused before any work starts."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.cpu.hybrid import check_pattern


@dataclass(frozen=True)
class Refusal:
    """A value of Megatron's arguments that cannot work on a CPU.

    Attributes:
        field: Name in the namespace of Megatron's parser.
        refuses: Whether a value cannot work.
        rule: Why not.
        way_out: What to do instead.
        flag: Name on the command line, where it is not that of the field.
    """

    field: str
    refuses: Callable[[Any], bool]
    rule: str
    way_out: str
    flag: str | None = None

    @property
    def argument(self) -> str:
        """The name that the user knows."""
        return self.flag or "--" + self.field.replace("_", "-")


def _more_than_one(value: Any) -> bool:
    return value is not None and int(value) > 1


def _given(value: Any) -> bool:
    return bool(value) and str(value) != "none"


def _is(*choices: str) -> Callable[[Any], bool]:
    # some of Megatron's choices are enumerations, some are strings
    return lambda value: getattr(value, "name", value) in choices


REFUSALS = (
    Refusal(
        "distributed_backend",
        _is("nccl"),
        "NCCL connects GPUs, processes on a CPU talk over gloo",
        "Pass --distributed-backend gloo",
    ),
    Refusal(
        "context_parallel_size",
        _more_than_one,
        "context parallelism is done by Transformer Engine's attention, which needs a GPU",
        "Pass --context-parallel-size 1 or use GPUs",
    ),
    Refusal(
        "transformer_impl",
        _is("transformer_engine", "inference_optimized"),
        "these layers are Transformer Engine's, which needs a GPU",
        "Pass --transformer-impl local",
    ),
    *(
        Refusal(
            field,
            _given,
            "8-bit and 4-bit products are Transformer Engine's, which needs a GPU",
            "Use --bf16, --fp16 or neither",
            f"--{field}-format",
        )
        for field in ("fp8", "fp4")
    ),
    *(
        Refusal(field, _given, "a CPU has no CUDA graphs", "Leave the flag out")
        for field in (
            "cuda_graph_impl",
            "enable_cuda_graph",
            "external_cuda_graph",
            "optimizer_cuda_graph",
        )
    ),
    Refusal(
        "attention_backend",
        _is("flash", "fused"),
        "this attention kernel runs on GPUs only",
        "Pass --attention-backend unfused",
    ),
    Refusal(
        "moe_token_dispatcher_type",
        _is("flex"),
        "this dispatcher is DeepEP's or HybridEP's, which need GPUs",
        "Pass --moe-token-dispatcher-type alltoall",
    ),
    Refusal(
        "gradient_accumulation_fusion",
        _given,
        "this fused kernel is Apex's or Transformer Engine's, which need a GPU",
        "Pass --no-gradient-accumulation-fusion",
        "gradient_accumulation_fusion",
    ),
    Refusal(
        "no_persist_layer_norm",
        lambda value: value is False,
        "the persistent layer norm is Apex's, which needs a GPU",
        "Pass --no-persist-layer-norm",
    ),
    Refusal(
        "use_precision_aware_optimizer",
        _given,
        "this Adam is Transformer Engine's, which needs a GPU",
        "Leave the flag out",
    ),
    Refusal(
        "tp_comm_overlap",
        _given,
        "this overlap is done by Transformer Engine, which needs a GPU",
        "Leave the flag out",
    ),
    Refusal("nccl_ub", _given, "NCCL's buffers are on GPUs", "Leave the flag out", "--use-nccl-ub"),
    Refusal(
        "fine_grained_activation_offloading",
        _given,
        "the activations are on the CPU already",
        "Leave the flag out",
    ),
    Refusal(
        "overlap_moe_expert_parallel_comm",
        _given,
        "this overlap runs on GPU streams",
        "Leave the flag out",
    ),
    Refusal(
        "profile",
        _given,
        "this profiler records GPU kernels",
        "Leave the flag out",
    ),
    Refusal(
        "record_memory_history",
        _given,
        "this records the GPU memory allocator",
        "Leave the flag out",
    ),
    Refusal("use_sharp", _given, "SHARP reduces for NCCL, which connects GPUs", "Leave it out"),
)


def _check_combinations(args: argparse.Namespace) -> None:
    size = getattr(args, "tensor_model_parallel_size", None)
    has_experts = _given(getattr(args, "num_experts", None))
    if _more_than_one(size) and has_experts and not getattr(args, "sequence_parallel", False):
        raise ConfigurationError(
            "--tensor-model-parallel-size",
            size,
            "Megatron trains experts with tensor parallelism only under sequence parallelism",
            "Pass --sequence-parallel, or --tensor-model-parallel-size 1",
        )
    if _more_than_one(size) and getattr(args, "multi_latent_attention", False):
        raise ConfigurationError(
            "--tensor-model-parallel-size",
            size,
            "the gradient of multi-latent attention's rotary key is not summed over the ranks by "
            "Megatron's local layers",
            "Pass --tensor-model-parallel-size 1",
        )
    if getattr(args, "optimizer_cpu_offload", False) and args.optimizer in ("adam", "sgd"):
        raise ConfigurationError(
            "--optimizer-cpu-offload",
            True,
            f"megatron-core's optimizer that off-loads {args.optimizer} needs a GPU",
            "Leave the flag out, or try it with another --optimizer",
        )
    fused = getattr(args, "apply_rope_fusion", None)
    if fused and getattr(args, "position_embedding_type", None) == "rope":
        raise ConfigurationError(
            "apply_rope_fusion",
            fused,
            "this fused kernel is Transformer Engine's, which needs a GPU",
            "Pass --no-rope-fusion",
        )


def check_supported(args: argparse.Namespace) -> None:
    """Raise for the first of Megatron's arguments whose value cannot work on a CPU.

    Args:
        args: The namespace of Megatron's parser; fields that it lacks are not looked at.

    Raises:
        ConfigurationError: Naming the flag, its value, the rule and the way out.
    """
    for refusal in REFUSALS:
        value = getattr(args, refusal.field, None)
        if refusal.refuses(value):
            raise ConfigurationError(refusal.argument, value, refusal.rule, refusal.way_out)
    check_pattern(getattr(args, "hybrid_layer_pattern", None) or "")
    _check_combinations(args)
