"""Configuration classes, which differ in their defaults.

megatron-core's ``OptimizerConfig`` keeps megatron-core's defaults; :class:`EmergingOptimizerConfig`
has the recommended ones.
"""

import copy
import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, cast

from megatron.core.optimizer.optimizer_config import (
    AdamOptimizerConfig,  # noqa: F401  re-exported
    OptimizerConfig,
    SGDOptimizerConfig,  # noqa: F401
)

from megatron_eopt.base.errors import ConfigurationTypeError, did_you_mean
from megatron_eopt.base.names import (
    DEFAULT_MATRIX_BUFFER_MB,
    DEFAULT_MAX_RANKS_PER_MATRIX,
    STANDARD_OPTIMIZERS,
    OptimizerDefaultsT,
    TpModeT,
)
from megatron_eopt.config.retired import RETIRED, without_retired
from megatron_eopt.math import AlgorithmT
from megatron_eopt.math.coefficients import CoefficientsLike
from megatron_eopt.math.low_precision import MomentumDtypeT
from megatron_eopt.math.moments import Moment2MethodT

_LIKE_MEGATRON: dict[str, object] = {
    "muon_algorithm": "standard",
    "muon_backend": "emerging_optimizers",
    "fused_adam": False,
    "muon_split_gated": False,
    "muon_split_mla": False,
    "muon_split_linear_attention": False,
}
"""Values that make the fields that megatron-core lacks reproduce its behaviour."""


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
class EmergingOptimizerConfig(OptimizerConfig, metaclass=_ConfigType):
    """``OptimizerConfig`` with recommended defaults and more fields; each is also a flag."""

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
    recommended = dataclasses.asdict(EmergingOptimizerConfig())
    if whose == "recommended":
        return recommended
    return {**recommended, **_LIKE_MEGATRON, **dataclasses.asdict(OptimizerConfig())}


def complete(config: Any) -> Any:
    """Return a configuration that has all our fields: those that it lacks act like megatron-core.

    The result is ``config`` itself if it lacks none.
    """
    missing = {n: v for n, v in default_values("megatron").items() if not hasattr(config, n)}
    if "muon_backend" in missing and config.muon_tp_mode == "distributed":
        missing["muon_backend"] = "torch"  # emerging-optimizers' needs whole matrices
    if not missing:
        return config
    # the caller's object stays as it is
    config = copy.copy(config)
    vars(config).update(missing)
    return config


def as_muon(config: Any, *, layer_wise: bool) -> Any:
    """Return a copy of a configuration with Muon in place of Adam or SGD.

    ``layer_wise`` also turns on sharded state.
    """
    if not isinstance(config, OptimizerConfig):
        return config  # resolving it raises the error
    config = copy.copy(config)
    if config.optimizer in STANDARD_OPTIMIZERS:
        config.optimizer = "muon"
    if layer_wise:
        config.use_layer_wise_distributed_optimizer = True
    return config
