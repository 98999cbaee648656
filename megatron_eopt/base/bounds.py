"""Bounds of all numbers that users set, by names of fields and of constructor arguments."""

from megatron_eopt.base.errors import check_number
from megatron_eopt.base.names import SMALLEST_MATRIX_BUFFER_MB

_NOT_NEGATIVE = (
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "muon_lr", "muon_min_lr"),
    *("weight_decay", "muon_weight_decay", "clip_grad", "grad_norm_skip_threshold"),
    *("loss_scale", "max_update_rms"),
    *("power_iter_steps", "precond_lr", "min_precond_lr", "damping_noise_scale"),
)
_DECAYS = (
    *("adam_beta1", "adam_beta2", "lion_beta1", "lion_beta2", "sgd_momentum"),
    *("betas", "beta2", "beta_lip", "momentum", "shampoo_beta"),
)
_POSITIVE = (
    *("adam_eps", "eps", "hyperball_eps", "hyperball_radius", "spectral_radius"),
    *("extra_scale_factor", "doubly_stochastic_tolerance", "num_iters", "precond_init_scale"),
    "warmup_steps",
)
BOUNDS: dict[str, dict[str, float]] = {
    **{name: {"at_least": 0.0} for name in _NOT_NEGATIVE},
    **{name: {"at_least": 0.0, "below": 1.0} for name in _DECAYS},
    **{name: {"above": 0.0} for name in _POSITIVE},
    "dim": {"at_least": -2.0, "at_most": 1.0},
    "optimizer_offload_fraction": {"at_least": 0.0, "at_most": 1.0},
    "matrix_buffer_mb": {"at_least": SMALLEST_MATRIX_BUFFER_MB},
    "muon_max_ranks_per_matrix": {"at_least": 1.0},
}
"""A field that sets a constructor's argument, such as ``muon_momentum``, has that one's bounds."""


def check_bounds(**numbers: object) -> None:
    """Raise a ConfigurationError for the first of these numbers that is out of its bounds."""
    for name, number in numbers.items():
        check_number(name, number, **BOUNDS[name])
