"""The trainer's flags without a GPU: other defaults, and values that need one."""

import argparse
from typing import Any, NamedTuple

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.cpu.hybrid import check_pattern

DEFAULTS: dict[str, object] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "use_cpu_initialization": True,
}
"""Destinations of the trainer's parser and their values here. What can only be had on a GPU is
still an error if it is asked for, see :func:`check_supported`."""


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Give the trainer's parser these defaults, for the flags that it knows."""
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{dest: value for dest, value in DEFAULTS.items() if dest in known})


class Refusal(NamedTuple):
    """A value of the trainer's flags that cannot work on a CPU."""

    dest: str  # name in the namespace of Megatron's parser
    rule: str  # why it cannot work
    way_out: str = "Leave the flag out"  # what to do instead
    values: tuple[object, ...] = ()  # which values cannot; without any, all that turn something on
    flag: str | None = None  # name on the command line, where it is not that of ``dest``

    def check(self, value: Any) -> None:
        """Raise a ConfigurationError for a value that cannot work."""
        # some of Megatron's choices are enumerations, some are strings
        name = getattr(value, "name", value)
        if name in self.values if self.values else name not in (None, 0, "", "none"):
            flag = self.flag or "--" + self.dest.replace("_", "-")
            raise ConfigurationError(flag, value, self.rule, self.way_out)


_GRAPHS = "a CPU has no CUDA graphs"
_PRODUCTS = "8-bit and 4-bit products are Transformer Engine's, which needs a GPU"
_BITS = "Use --bf16, --fp16 or neither"

REFUSALS = (
    Refusal(
        "distributed_backend",
        "NCCL connects GPUs, processes on a CPU talk over gloo",
        "Pass --distributed-backend gloo",
        ("nccl",),
    ),
    Refusal(
        "transformer_impl",
        "these layers are Transformer Engine's, which needs a GPU",
        "Pass --transformer-impl local",
        ("transformer_engine", "inference_optimized"),
    ),
    Refusal(
        "attention_backend",
        "this attention kernel runs on GPUs only",
        "Pass --attention-backend unfused",
        ("flash", "fused"),
    ),
    Refusal(
        "moe_token_dispatcher_type",
        "this dispatcher is DeepEP's or HybridEP's, which need GPUs",
        "Pass --moe-token-dispatcher-type alltoall",
        ("flex",),
    ),
    Refusal(
        "gradient_accumulation_fusion",
        "this fused kernel is Apex's or Transformer Engine's, which need a GPU",
        "Pass --no-gradient-accumulation-fusion",
        flag="gradient_accumulation_fusion",
    ),
    Refusal(
        "no_persist_layer_norm",
        "the persistent layer norm is Apex's, which needs a GPU",
        "Pass --no-persist-layer-norm",
        (False,),
    ),
    Refusal("fp8", _PRODUCTS, _BITS, flag="--fp8-format"),
    Refusal("fp4", _PRODUCTS, _BITS, flag="--fp4-format"),
    Refusal("cuda_graph_impl", _GRAPHS),
    Refusal("enable_cuda_graph", _GRAPHS),
    Refusal("external_cuda_graph", _GRAPHS),
    Refusal("optimizer_cuda_graph", _GRAPHS),
    Refusal(
        "use_precision_aware_optimizer", "this Adam is Transformer Engine's, which needs a GPU"
    ),
    Refusal("tp_comm_overlap", "this overlap is done by Transformer Engine, which needs a GPU"),
    Refusal("overlap_moe_expert_parallel_comm", "this overlap runs on GPU streams"),
    Refusal("nccl_ub", "NCCL's buffers are on GPUs", flag="--use-nccl-ub"),
    Refusal("use_sharp", "SHARP reduces for NCCL, which connects GPUs"),
    Refusal("fine_grained_activation_offloading", "the activations are on the CPU already"),
    Refusal("profile", "this profiler records GPU kernels"),
    Refusal("record_memory_history", "this records the GPU memory allocator"),
)


def check_supported(args: argparse.Namespace) -> None:
    """Raise for the first of Megatron's arguments whose value cannot work on a CPU.

    Args:
        args: The namespace of Megatron's parser; fields that it lacks are not looked at.

    Raises:
        ConfigurationError: Naming the flag, its value, the rule and the way out.
    """
    for refusal in REFUSALS:
        refusal.check(getattr(args, refusal.dest, None))
    check_pattern(getattr(args, "hybrid_layer_pattern", None) or "")
    _check_parallel_sizes(args)
    if getattr(args, "optimizer_cpu_offload", False) and args.optimizer in ("adam", "sgd"):
        rule = f"megatron-core's optimizer that off-loads {args.optimizer} needs a GPU"
        way_out = "Leave the flag out, or try it with another --optimizer"
        raise ConfigurationError("--optimizer-cpu-offload", True, rule, way_out)
    fused = getattr(args, "apply_rope_fusion", None)
    if fused and getattr(args, "position_embedding_type", None) == "rope":
        rule = "this fused kernel is Transformer Engine's, which needs a GPU"
        raise ConfigurationError("apply_rope_fusion", fused, rule, "Pass --no-rope-fusion")


def _check_parallel_sizes(args: argparse.Namespace) -> None:
    if (size := getattr(args, "context_parallel_size", None) or 1) > 1:
        rule = "context parallelism is done by Transformer Engine's attention, which needs a GPU"
        way_out = "Pass --context-parallel-size 1 or use GPUs"
        raise ConfigurationError("--context-parallel-size", size, rule, way_out)
    if (size := getattr(args, "tensor_model_parallel_size", None) or 1) == 1:
        return
    if getattr(args, "num_experts", None) and not getattr(args, "sequence_parallel", False):
        rule = "Megatron trains experts with tensor parallelism only under sequence parallelism"
        way_out = "Pass --sequence-parallel, or --tensor-model-parallel-size 1"
        raise ConfigurationError("--tensor-model-parallel-size", size, rule, way_out)
    if getattr(args, "multi_latent_attention", False):
        rule = (
            "the gradient of multi-latent attention's rotary key is not summed over the ranks by "
            "Megatron's local layers"
        )
        way_out = "Pass --tensor-model-parallel-size 1"
        raise ConfigurationError("--tensor-model-parallel-size", size, rule, way_out)
