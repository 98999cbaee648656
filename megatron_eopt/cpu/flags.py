"""Defaults of the trainer's flags on a CPU, and errors for flags that need a GPU."""

import argparse
from typing import Any, NamedTuple

from megatron_eopt.base import gpu
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
"""Defaults on a CPU by parsed name. A flag that asks for a GPU feature still raises an error, see
:func:`check_supported`."""


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Set the CPU defaults of those flags that the trainer's parser has."""
    # releases of Megatron differ in their flags
    flags = {action.dest for action in parser._actions}
    parser.set_defaults(**{dest: value for dest, value in DEFAULTS.items() if dest in flags})


class Refusal(NamedTuple):
    """A trainer flag that needs a GPU."""

    dest: str  # parsed name
    rule: str  # why it needs a GPU
    hint: str = "Leave the flag out"  # what to do instead
    values: tuple[object, ...] = ()  # the values that need a GPU; empty for all that are not off
    flag: str | None = None  # name on the command line, if it differs from ``dest``

    def check(self, value: Any) -> None:
        """Raise a ConfigurationError if the value needs a GPU."""
        # some of Megatron's choices are enumerations, some are strings
        name = getattr(value, "name", value)
        if name in self.values if self.values else name not in (None, 0, "", "none"):
            flag = self.flag or "--" + self.dest.replace("_", "-")
            raise ConfigurationError(flag, value, self.rule, self.hint)


_GRAPHS = "a CPU has no CUDA graphs"
_PRODUCTS = "uses matrix products of Transformer Engine, which needs a GPU"
_BITS = "Use --bf16, --fp16 or neither"

REFUSALS = (
    Refusal(
        "distributed_backend",
        "NCCL connects GPUs, but CPU processes need gloo",
        "Pass --distributed-backend gloo",
        ("nccl",),
    ),
    Refusal(
        "transformer_impl",
        "uses layers of Transformer Engine, which needs a GPU",
        "Pass --transformer-impl local",
        ("transformer_engine", "inference_optimized"),
    ),
    Refusal(
        "attention_backend",
        "uses an attention kernel that needs a GPU",
        "Pass --attention-backend unfused",
        ("flash", "fused"),
    ),
    Refusal(
        "moe_token_dispatcher_type",
        "uses DeepEP or HybridEP, which need a GPU",
        "Pass --moe-token-dispatcher-type alltoall",
        ("flex",),
    ),
    Refusal(
        "gradient_accumulation_fusion",
        "uses a kernel of Apex or Transformer Engine, which need a GPU",
        "Pass --no-gradient-accumulation-fusion",
        flag="gradient_accumulation_fusion",
    ),
    Refusal(
        "no_persist_layer_norm",
        "uses the persistent layer norm of Apex, which needs a GPU",
        "Pass --no-persist-layer-norm",
        (False,),
    ),
    Refusal("fp8", _PRODUCTS, _BITS, flag="--fp8-format"),
    Refusal("fp4", _PRODUCTS, _BITS, flag="--fp4-format"),
    Refusal("cuda_graph_impl", _GRAPHS),
    Refusal("enable_cuda_graph", _GRAPHS),
    Refusal("external_cuda_graph", _GRAPHS),
    Refusal("optimizer_cuda_graph", _GRAPHS),
    Refusal("use_precision_aware_optimizer", "uses Transformer Engine's Adam, which needs a GPU"),
    Refusal("tp_comm_overlap", "uses Transformer Engine, which needs a GPU"),
    Refusal("overlap_moe_expert_parallel_comm", "needs GPU streams"),
    Refusal("nccl_ub", "NCCL's buffers are on GPUs", flag="--use-nccl-ub"),
    Refusal("use_sharp", "SHARP works with NCCL, which connects GPUs"),
    Refusal("fine_grained_activation_offloading", "the activations are already on the CPU"),
    Refusal("profile", "records GPU kernels only"),
    Refusal("record_memory_history", "records the GPU memory allocator only"),
)


def check_supported(args: argparse.Namespace) -> None:
    """Raise a ConfigurationError for the first trainer flag that needs a GPU.

    Args:
        args: Namespace of Megatron's parser; missing flags are not checked.
    """
    for refusal in REFUSALS:
        refusal.check(getattr(args, refusal.dest, None))
    check_pattern(getattr(args, "hybrid_layer_pattern", None) or "")
    _check_parallel_sizes(args)
    # other optimizers are off-loaded by this package, which needs no GPU for it
    if getattr(args, "optimizer_cpu_offload", False) and args.optimizer in ("adam", "sgd"):
        raise gpu.needed_to_off_load("--optimizer-cpu-offload", args.optimizer)
    fused = getattr(args, "apply_rope_fusion", None)
    if fused and getattr(args, "position_embedding_type", None) == "rope":
        rule = "uses a kernel of Transformer Engine, which needs a GPU"
        raise ConfigurationError("apply_rope_fusion", fused, rule, "Pass --no-rope-fusion")


def _check_parallel_sizes(args: argparse.Namespace) -> None:
    if (size := getattr(args, "context_parallel_size", None) or 1) > 1:
        rule = "context parallelism uses Transformer Engine's attention, which needs a GPU"
        hint = "Pass --context-parallel-size 1 or use GPUs"
        raise ConfigurationError("--context-parallel-size", size, rule, hint)
    if (size := getattr(args, "tensor_model_parallel_size", None) or 1) == 1:
        return
    if getattr(args, "num_experts", None) and not getattr(args, "sequence_parallel", False):
        rule = "Megatron trains experts with tensor parallelism only if sequence parallelism is on"
        hint = "Pass --sequence-parallel, or --tensor-model-parallel-size 1"
        raise ConfigurationError("--tensor-model-parallel-size", size, rule, hint)
    if getattr(args, "multi_latent_attention", False):
        rule = (
            "the gradient of multi-latent attention's rotary key would not be summed over the "
            "ranks by Megatron's local layers"
        )
        hint = "Pass --tensor-model-parallel-size 1"
        raise ConfigurationError("--tensor-model-parallel-size", size, rule, hint)
