"""Which optimizer class wrote a parameter group that names none, and what its state means.

torch's state dicts and megatron-core's checkpoints do not name the class. Its settings tell it: the
keys of the group, and values that change what is averaged. State of a class that is not in this
table means nothing to any other optimizer, because a key such as ``exp_avg`` alone does not say
what was averaged. Tests run the installed classes to check the table.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

MEAN, SUM = "mean of gradients", "sum of gradients"
SQUARES = "mean of squared gradients"
MAXIMA = "maximum of such means"

UNKNOWN = "an unknown optimizer"
"""Stands for every class that is not in the table."""


class Writer(NamedTuple):
    """A class, or several that have the same settings and write the same state."""

    name: str  # as it is registered, or its class in another package
    always: frozenset[str]  # settings that its groups have in all versions
    sometimes: frozenset[str]  # settings that only some versions have


def _writer(name: str, always: str, sometimes: str = "") -> Writer:
    return Writer(name, frozenset(always.split()), frozenset(sometimes.split()))


_HOW = "maximize foreach capturable differentiable fused"
_OF_TIMM = "caution corrected_weight_decay max_lr_snapshot"

_WRITERS = (
    # torch; also with fewer settings in older versions, and DeepSpeed's on the host
    _writer("adam", "betas eps amsgrad", f"{_HOW} decoupled_weight_decay bias_correction"),
    # Transformer Engine, apex and DeepSpeed
    _writer("adam", "betas eps bias_correction"),
    _writer("sgd", "momentum dampening nesterov", _HOW),
    _writer("torch.optim.Muon", "momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn"),
    _writer("torch.optim.NAdam", "betas eps decoupled_weight_decay momentum_decay", _HOW),
    _writer("torch.optim.RAdam", "betas eps decoupled_weight_decay", _HOW),
    # emerging-optimizers, also as megatron-core builds them
    _writer("laprop", "betas eps correct_bias"),
    _writer("lion", "betas"),
    _writer("oblique_adam", "betas eps correct_bias dim"),
    _writer("oblique_sgd", "momentum eps dim"),
    _writer("psgd_pro", "momentum beta_lip precond_lr min_precond_lr"),
    *(_writer(name, "betas eps shampoo_beta") for name in ("soap", "rekls")),
    _writer("adaptive_muon", "momentum beta2 eps"),
    *(
        _writer(name, "momentum")
        for name in ("muon", "mop", "muon_hyperball", "polargrad", "scion", "sinkhorn_muon", "spel")
    ),
    _writer(
        "timm.optim.AdamWLegacy",
        f"betas eps amsgrad foreach maximize capturable {_OF_TIMM}",
        "clipping_threshold",
    ),
    _writer("timm.optim.Lion", f"betas foreach maximize {_OF_TIMM}"),
    _writer(
        "timm.optim.Muon",
        "momentum nesterov ns_steps ns_coefficients eps safety_factor adjust_lr_fn conv_mode "
        "normalize_spatial fallback_lr_scale betas algo scale_eps capturable verbose",
    ),
    _writer(
        "timm.optim.NAdamW",
        f"betas eps foreach maximize capturable {_OF_TIMM}",
        "clipping_threshold",
    ),
    _writer(
        "timm.optim.SGDW",
        f"momentum dampening nesterov foreach maximize differentiable {_OF_TIMM}",
    ),
)
"""Classes by their settings; of those with the same settings, the most likely one is first."""

_MOMENTS = {"exp_avg": MEAN, "exp_avg_sq": SQUARES, "max_exp_avg_sq": MAXIMA}

FOREIGN: Mapping[str, Mapping[str, str | None]] = MappingProxyType(
    {
        "timm.optim.AdamWLegacy": _MOMENTS,
        "timm.optim.Lion": {"exp_avg": MEAN},
        # with ``algo="adamuon"``, its second moments are those of updates
        "timm.optim.Muon": {
            "momentum_buffer": MEAN,
            "exp_avg": MEAN,
            **dict.fromkeys(("exp_avg_sq", "use_muon")),
        },
        "timm.optim.NAdamW": {"exp_avg": MEAN, "exp_avg_sq": SQUARES},
        "timm.optim.SGDW": {"momentum_buffer": SUM},
        "torch.optim.Muon": {"momentum_buffer": MEAN},
        "torch.optim.NAdam": {"exp_avg": MEAN, "exp_avg_sq": SQUARES, "mu_product": None},
        "torch.optim.RAdam": {"exp_avg": MEAN, "exp_avg_sq": SQUARES},
    }
)
"""What the state of classes means that are not registered here, by class and key."""

_PLAIN = {"maximize": False, "clipping_threshold": None}
"""Settings with the only value for which the meanings above hold."""

TOLD = ("momentum", "dampening", *_PLAIN)
"""Settings whose values, not only names, tell what state means."""

_OF_TRAINERS = frozenset(
    # torch, its schedulers, and scripts
    "params param_names lr weight_decay step initial_lr base_momentum max_momentum swa_lr name "
    "names group_name lr_scale "
    # Megatron
    "max_lr min_lr start_wd end_wd lr_mult wd_mult default_config optimizer group_id "
    "is_expert_parallel is_decoupled_lr is_vision_model_param".split()
)
"""Settings that every class has, and those that training scripts add to groups of any class."""


def writers_by_settings(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes that may have written a group, or :data:`UNKNOWN` alone."""
    # NeMo writes megatron-core's names with a prefix
    keys = {key for key in group if key.removeprefix("pre_") not in _OF_TRAINERS}
    # a value that was not read is None
    if any(group.get(key) not in (None, plain) for key, plain in _PLAIN.items()):
        return (UNKNOWN,)
    fitting = [w.name for w in _WRITERS if w.always <= keys <= w.always | w.sometimes]
    return tuple(dict.fromkeys(fitting)) or (UNKNOWN,)


def momentum_of(group: Mapping[str, Any]) -> float | None:
    """Return the momentum of a group as if it did not dampen gradients; None if it has none.

    A sum of gradients tends to ``(1 - dampening) / (1 - momentum)`` times their mean, and without
    dampening to ``1 / (1 - momentum)`` times.
    """
    momentum, dampening = group.get("momentum"), group.get("dampening") or 0.0
    if momentum is None or dampening == 1.0:
        return None
    return 1.0 - (1.0 - float(momentum)) / (1.0 - float(dampening)) if dampening else momentum
