"""Configuration classes.

The class decides what a configuration means: megatron-core's own ``OptimizerConfig`` means exactly
what it means to megatron-core, and :class:`EmergingOptimizerConfig` has the defaults recommended
here.
"""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer.optimizer_config import (
    AdamOptimizerConfig,  # noqa: F401  a name of the package's
    OptimizerConfig,
    SGDOptimizerConfig,  # noqa: F401
)

from megatron_eopt.base.names import (
    DEFAULT_TEAM_SIZE,
    DEFAULT_WAVE_MB,
    STANDARD_OPTIMIZERS,
    OptimizerDefaultsT,
    TpModeT,
)
from megatron_eopt.math import AlgorithmT
from megatron_eopt.math.low_precision import MomentumDtypeT

_LIKE_MEGATRON: dict[str, object] = {
    "muon_algorithm": "standard",
    "muon_backend": "emerging_optimizers",
    "muon_split_gated": False,
    "muon_split_mla": False,
    "muon_split_linear_attention": False,
}
"""What fields that megatron-core lacks must be to do what it does."""


@dataclass
class EmergingOptimizerConfig(OptimizerConfig):
    """An ``OptimizerConfig`` with recommended defaults and the further choices made here."""

    muon_tp_mode: TpModeT = "auto"
    """Where a tensor-parallel matrix is orthogonalized; "auto" picks the cheapest exact way."""

    muon_lr: float | None = None
    """Largest learning rate of the emerging optimizer; None means ``lr``."""

    muon_min_lr: float | None = None
    """Smallest learning rate of the emerging optimizer's schedule; None means ``min_lr``."""

    muon_exempt_from_clipping: bool = False
    """Leave the emerging optimizer's gradients out when gradients are clipped. Its update does not
    depend on their size, and clipping can push them down to its eps floor."""

    muon_orthogonalize_router: bool = True
    """Whether the weights of mixture-of-experts routers are matrices (megatron-core says yes) or go
    to the scalar optimizer."""

    muon_orthogonalize_excluded: bool = False
    """Whether matrices that modules mark with ``use_muon = False`` are matrices all the same.
    megatron-core 0.20 marks some that 0.19 gave to Muon, whose momentum a resumed run has."""

    muon_split_gated: bool = True
    """Whether gate and up projection of a fused gated MLP are two matrices."""

    muon_split_mla: bool = True
    """Whether the fused projections of multi-latent attention are split into their matrices."""

    muon_split_linear_attention: bool = True
    """Whether the input projection of linear attention layers is split into its matrices."""

    muon_split_per_head: bool = False
    """Whether each head's rows of an attention projection are a matrix of their own."""

    muon_algorithm: AlgorithmT = "auto"
    """Newton-Schulz by the book ("standard"), on the Gram matrix ("gram"), or whichever is cheaper
    among those that are accurate enough ("auto")."""

    muon_wave_mb: float = DEFAULT_WAVE_MB
    """MiB of whole matrices that one rank brings together at a time, for SOAP and its like too. A
    step's working memory depends on it, and on the largest matrix, but not on the model."""

    muon_team_size: int = DEFAULT_TEAM_SIZE
    """Most ranks that compute one matrix together where there are more ranks than work, in sharded
    storage; 1 for none. By default as many as a computer has GPUs."""

    muon_overlap_step: bool = False
    """Whether Muon's updates are computed while gradients are still reduced, and each bucket of
    parameters is gathered as soon as it is stepped. The weights are those of a step without it. It
    needs overlap_grad_reduce and overlap_param_gather."""

    muon_momentum_dtype: MomentumDtypeT = "fp32"
    """How the momentum of Muon and adaptive Muon is kept between steps: in float32, or rounded to
    "bf16" at random, or to "fp8" or "int8" with a scale for each block of 32."""

    muon_backend: str = "auto"
    """Whose kernels run the iteration: our own on torch's products ("torch"), another package's, or
    the fastest that is installed and serves the GPU ("auto"). With "emerging_optimizers" all bits
    are megatron-core's, those of Adam included."""

    adaptive_muon_bias_correction: bool = False
    """Whether second moments are divided by ``1 - beta2^step``, so that the first steps of AdaMuon
    and NAMO are no longer than later ones."""

    checkpoint_fresh_state: tuple[str, ...] = ()
    """Names of optimizer states that may be missing in a checkpoint and then start anew."""

    checkpoint_momentum_from_adam: bool = False
    """Whether momentum that a checkpoint of Adam lacks starts as Adam's first moment."""

    print_optimizer_routing: bool = False
    """Log a table of every parameter's optimizer, split, learning rate, weight decay and why."""

    log_optimizer_memory: bool = False
    """Watch what the second step allocates, and log what each kind of tensor takes."""

    log_optimizer_stats: bool = False
    """Measure steps: the sizes of weights and updates, orthogonality, and where the time goes. The
    trainer writes that to TensorBoard and W&B; other callers read ``optimizer.stats()``."""


def default_values(whose: OptimizerDefaultsT) -> dict[str, Any]:
    """Return the recommended default of every field, or megatron-core's where it has the field."""
    recommended = dataclasses.asdict(EmergingOptimizerConfig())
    if whose == "recommended":
        return recommended
    return {**recommended, **_LIKE_MEGATRON, **dataclasses.asdict(OptimizerConfig())}


def as_muon(config: Any, *, layer_wise: bool) -> Any:
    """Return a copy of a configuration, which means Muon where it names Adam or SGD.

    With ``layer_wise`` the state is kept in fragments, whatever the configuration says.
    """
    if not isinstance(config, OptimizerConfig):
        return config  # which is refused as anywhere
    config = copy.copy(config)
    if config.optimizer in STANDARD_OPTIMIZERS:
        config.optimizer = "muon"
    if layer_wise:
        config.use_layer_wise_distributed_optimizer = True
    return config
