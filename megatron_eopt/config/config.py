"""The configuration of an optimizer, with recommended defaults.

megatron-core's ``OptimizerConfig``, or any dataclass with fields of these names, serves as well.
Fields that it lacks then act like megatron-core.
"""

import copy
import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, cast

import megatron_eopt
from megatron_eopt.base.errors import ConfigurationTypeError, did_you_mean
from megatron_eopt.base.names import (
    DEFAULT_MATRIX_BUFFER_MB,
    DEFAULT_MAX_RANKS_PER_MATRIX,
    OptimizerDefaultsT,
    TpModeT,
)
from megatron_eopt.config.retired import RETIRED, without_retired
from megatron_eopt.math import AlgorithmT
from megatron_eopt.math.coefficients import CoefficientsLike
from megatron_eopt.math.low_precision import MomentumDtypeT
from megatron_eopt.math.moments import Moment2MethodT

LIKE_MEGATRON: dict[str, object] = {
    "muon_tp_mode": "blockwise",
    "muon_scale_mode": "spectral",
    "muon_nesterov": False,
    "adaptive_muon_moment2_method": "adamuon",
    "muon_algorithm": "standard",
    "muon_backend": "emerging_optimizers",
    "fused_adam": False,
    "muon_split_gated": False,
    "muon_split_mla": False,
    "muon_split_linear_attention": False,
}
"""Values that differ from the recommended ones and reproduce megatron-core's behaviour."""


_ESSENTIAL = ("optimizer", "lr", "weight_decay")
"""Fields without which a dataclass is no configuration of an optimizer."""


class _ConfigType(type):
    """Checks the names of fields, and drops retired ones."""

    def __call__[T](cls: type[T], *args: Any, **fields: Any) -> T:
        """Raise a ConfigurationTypeError for a field that does not exist, naming similar ones."""
        kept, config_cls = without_retired(fields), cast(Any, cls)
        names = [field.name for field in dataclasses.fields(config_cls) if field.init]
        for name, value in kept.items():
            if name not in names:
                hint = did_you_mean(name, names, "Leave it out", shown=str)
                rule = f"is not a field of {cls.__name__}"
                raise ConfigurationTypeError(name, value, rule, hint)
        return cast(T, type.__call__(cls, *args, **kept))

    @property
    def __signature__(cls) -> inspect.Signature:
        """With retired fields, since readers of files leave out what no parameter takes."""
        _, *own = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
        kind = inspect.Parameter.KEYWORD_ONLY
        old = [inspect.Parameter(n, kind, default=its.default) for n, its in RETIRED.items()]
        return inspect.Signature(sorted([*own, *old], key=lambda one: one.kind))


@dataclass
class TorchOptimizerConfig(metaclass=_ConfigType):
    """What an optimizer in your own training loop needs, with recommended defaults."""

    lr: float | None = None
    """Learning rate at the end of the warm-up. Every group without a rate of its own uses it;
    None if a scheduler sets it before the first step."""

    min_lr: float | None = None
    """Final learning rate of Megatron's schedule."""

    decoupled_lr: float | None = None
    """Learning rate of the embedding and the output layer."""

    decoupled_min_lr: float | None = None
    """Final learning rate of the embedding and the output layer in Megatron's schedule."""

    weight_decay: float = 0.01
    """Weight decay coefficient."""

    apply_wd_to_qk_layernorm: bool = False
    """Apply weight decay to the norms of queries and keys, too."""

    fp16: bool = False
    """The model's weights are float16."""

    bf16: bool = False
    """The model's weights are bfloat16."""

    optimizer: str = "adam"
    """Name of the main optimizer, such as "muon"."""

    loss_scale: float | None = None
    """Constant loss scale. Without it, fp16 uses a dynamic one."""

    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""

    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""

    adam_eps: float = 1e-08
    """Added to Adam's denominator."""

    decoupled_weight_decay: bool = True
    """Weight decay shrinks weights directly, as in AdamW. If off, it is added to gradients."""

    sgd_momentum: float = 0.9
    """Momentum of SGD."""

    muon_momentum: float = 0.95
    """Momentum of Muon and adaptive Muon."""

    muon_split_qkv: bool = True
    """Split a fused attention projection into Q, K and V matrices."""

    muon_fp32_matmul_prec: str = "medium"
    """Precision of the matrix products in Newton-Schulz. "highest" is float32, "high" TF32,
    "medium" 16 bits."""

    muon_num_ns_steps: int = 5
    """Number of Newton-Schulz steps."""

    muon_extra_scale_factor: float = 1.0
    """Multiplies every update."""

    muon_scalar_optimizer: str = "adam"
    """Optimizer of the parameters that are not matrices."""

    lion_beta1: float = 0.95
    """Weight of the momentum in Lion's update."""

    lion_beta2: float = 0.98
    """Decay of Lion's momentum."""

    soap_shampoo_beta: float = 0.95
    """Decay of SOAP's statistics."""

    soap_precondition_frequency: int = 1
    """Not used by SOAP of emerging-optimizers 0.3. A value other than the default gives a
    warning."""

    soap_use_kl_shampoo: bool = True
    """Use KL-Shampoo's statistics."""

    adaptive_muon_beta2: float = 0.95
    """Decay of the second moment."""

    adaptive_muon_eps: float = 1e-08
    """Added to the divisor (AdaMuon, NAMO), or the smallest mean square (NorMuon)."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the data-parallel ranks."""

    optimizer_cpu_offload: bool = False
    """Keep optimizer state and main weights in host memory."""

    optimizer_offload_fraction: float = 0.0
    """Share of the optimizer state that is in host memory."""

    clip_grad: float = 1.0
    """Largest norm of all gradients, under Megatron. Larger gradients are scaled down."""

    muon_tp_mode: TpModeT = "auto"
    """How to orthogonalize a tensor-parallel matrix: "auto" picks the cheapest of "duplicated",
    "distributed" and "exchange", which give the unsharded matrix's update. "blockwise" treats each
    shard as a matrix, which changes the update."""

    muon_scale_mode: str = "adamw_rms"
    """How the size of an update follows from its matrix's shape. "adamw_rms" gives updates AdamW's
    usual size, so AdamW's learning rate fits (arXiv:2502.16982). "spectral", megatron-core's
    default, makes them five times as large."""

    muon_nesterov: bool = True
    """Orthogonalize a mix of momentum and gradient, as Nesterov's method does, in place of the
    momentum alone, megatron-core's default."""

    cautious_weight_decay: bool = False
    """Decay weights only where their update does not have the opposite sign (Chen et al. 2025,
    arXiv:2510.12402); for Muon, its variants and Adam."""

    muon_coefficient_type: CoefficientsLike = "quintic"
    """Newton-Schulz coefficients: the name of a set, or your own ``(a, b, c)``, or a list of such
    triples, which steps use in turn. The flag takes ``a,b,c`` or ``a,b,c,a,b,c``, and so on."""

    muon_lr: float | None = None
    """Peak learning rate of Muon and its variants; by default ``lr``, which Adam also uses."""

    muon_min_lr: float | None = None
    """Lowest learning rate in the schedule of Muon and its variants; by default ``min_lr``."""

    muon_weight_decay: float | None = None
    """Weight decay of Muon and its variants, constant; by default ``weight_decay``, which Adam also
    uses."""

    muon_skip_grad_clip: bool = False
    """Do not scale Muon's gradients when clipping; they still count in the gradient norm. Use it if
    clipping makes gradients so small that the eps of the orthogonalization affects the update."""

    muon_orthogonalize_router: bool = True
    """Update mixture-of-experts router weights with Muon, as megatron-core does; if off, with the
    scalar optimizer (Adam)."""

    muon_ignore_use_muon: bool = False
    """Update matrices with Muon even if their module sets ``use_muon = False``. Use it to resume a
    run of megatron-core 0.19 with 0.20, which excludes more matrices."""

    muon_convolutions: bool = False
    """Update the weights of convolutions with Muon, each flattened to (out, in x kernel). A grouped
    convolution is one matrix per group. Depthwise ones, and one that is a model's first layer, keep
    the scalar optimizer."""

    muon_split_gated: bool = True
    """Split a fused gated MLP weight into gate and up matrices; megatron-core treats it as one."""

    muon_split_mla: bool = True
    """Split multi-latent attention's fused weights into matrices, unlike megatron-core."""

    muon_split_linear_attention: bool = True
    """Split a linear-attention layer's fused input weight into matrices, unlike megatron-core."""

    muon_split_per_head: bool = False
    """Split attention projections into one matrix per head; off by default, as in megatron-core."""

    muon_algorithm: AlgorithmT = "auto"
    """Newton-Schulz iteration: "standard", "gram" (on the Gram matrix, cheaper for elongated
    matrices), or "auto", the cheaper one that is accurate enough."""

    matrix_buffer_mb: float = DEFAULT_MATRIX_BUFFER_MB
    """MiB of full matrices that a rank assembles at a time, for Muon and for optimizers with
    full-matrix state such as SOAP. Lower it if a step runs out of memory. On one rank, Muon takes a
    quarter of all matrices at a time unless this is below its default."""

    muon_max_ranks_per_matrix: int = DEFAULT_MAX_RANKS_PER_MATRIX
    """Most ranks that orthogonalize one matrix together if there are more ranks than work, with the
    distributed optimizer. Use the number of GPUs in a node; 1 turns this off."""

    muon_overlap_dp_comm: bool = False
    """Overlap Muon's step with gradient reduction and parameter gathering; results do not change.
    Needs ``overlap_grad_reduce``, ``overlap_param_gather`` and 2 more bytes per weight."""

    muon_momentum_dtype: MomentumDtypeT = "fp32"
    """How Muon and adaptive Muon store momentum: "fp32", "bf16" (2 bytes, stochastic rounding), or
    "fp8" and "int8" (about 1 byte, one scale per 32 values). Fewer bits save memory."""

    muon_backend: str = "auto"
    """Kernels for the orthogonalization: "torch", a package's, or "auto" (gram-newton-schulz if
    installed and supported by the GPU, else "torch"). "emerging_optimizers" reproduces
    megatron-core's results bit for bit."""

    muon_use_syrk: bool = False
    """Has no effect; megatron-core 0.20 has this field. On GPUs, symmetric products are computed as
    such anyway."""

    fused_adam: bool = True
    """Update parameters with torch's fused Adam if neither Transformer Engine nor Apex is
    installed. If off, their updates equal megatron-core's bit for bit."""

    adaptive_muon_moment2_method: Moment2MethodT = "normuon"
    """Which second moments to use. "normuon" and "namo" have updates of Muon's size. "adamuon",
    megatron-core's default, needs ``muon_scale_mode="shape_scaling"`` and
    ``muon_extra_scale_factor=0.2``."""

    adaptive_muon_bias_correction: bool = False
    """Divide second moments by ``1 - beta2^step``, so that the first steps of AdaMuon and NAMO are
    not longer than later ones."""

    optimizer_kernels: bool = True
    """Use this package's GPU kernels in optimizer steps. If off, or with MEGATRON_EOPT_KERNELS=0 in
    the environment, torch's functions compute everything, which is slower. Turn it off to find out
    whether a kernel is the cause of an error or a wrong loss. It holds for the whole process."""

    print_optimizer_routing: bool = False
    """Log a table of each parameter's optimizer, split, learning rate, weight decay and reason."""

    log_optimizer_stats: bool = False
    """Measure the sizes of weights and updates, and the times of steps. The trainer writes them to
    TensorBoard and W&B; in your own loop read ``optimizer.stats()`` on all ranks."""


def default_values(whose: OptimizerDefaultsT) -> dict[str, Any]:
    """Return every field's default: the recommended ones, or those that act like megatron-core."""
    recommended = dataclasses.asdict(TorchOptimizerConfig())
    return recommended if whose == "recommended" else recommended | LIKE_MEGATRON


def is_config(config: object) -> bool:
    """Whether this is a configuration of an optimizer, of whichever package."""
    is_instance = dataclasses.is_dataclass(config) and not isinstance(config, type)
    return is_instance and all(hasattr(config, name) for name in _ESSENTIAL)


def complete(config: Any) -> Any:
    """Return a configuration that has all our fields: those that it lacks act like megatron-core.

    The result is ``config`` itself if it lacks none.
    """
    missing = {n: v for n, v in default_values("megatron").items() if not hasattr(config, n)}
    if "muon_backend" in missing and getattr(config, "muon_tp_mode", None) == "distributed":
        missing["muon_backend"] = "torch"  # emerging-optimizers' needs whole matrices
    if "muon_tp_mode" in missing:
        missing["muon_tp_mode"] = "auto"  # who has no such field has nothing that cuts matrices
    if not missing:
        return config
    # the caller's object stays as it is
    config = copy.copy(config)
    vars(config).update(missing)
    return config


def __getattr__(name: str) -> Any:
    # earlier versions have pickled that class by this module's name
    if name != "EmergingOptimizerConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return megatron_eopt.EmergingOptimizerConfig
