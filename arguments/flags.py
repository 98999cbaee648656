"""The flags, as data: one group per optimizer."""

import argparse
from typing import Any, get_args

from megatron_eopt.base.names import SCALAR_OPTIMIZERS, STANDARD_OPTIMIZERS, OptimizerDefaultsT
from megatron_eopt.math import backend_names, coefficient_names
from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.settings.checks import CHOICES
from megatron_eopt.settings.config import EmergingOptimizerConfig
from megatron_eopt.settings.fields import field_types
from megatron_eopt.settings.registry import optimizer_names


def choices_of_trainer_flags() -> dict[str, tuple[str, ...]]:
    """Return, by parsed name, the choices of flags that the trainer's parser may have already."""
    names = optimizer_names()
    old = tuple(f"dist_{name}" for name in names if name not in STANDARD_OPTIMIZERS)
    coefficients, scalars = coefficient_names(), SCALAR_OPTIMIZERS
    muons = {"muon_coefficient_type": coefficients, "muon_scalar_optimizer": scalars}
    return {**CHOICES, **muons, "optimizer": (*names, *old)}


GROUPS: dict[str, dict[str, str]] = {
    "optimizer layer": {
        "optimizer-defaults": "Whose default values the flags have: megatron's own, or the "
        "recommended ones.",
        "optimizer-config": "YAML file that describes the optimizer; its keys are named like these "
        "flags.",
        "print-optimizer-routing": "Log which parameter goes to which optimizer, and why.",
        "log-optimizer-memory": "Log how much memory weights, gradients, state and buffers take, "
        "and the peak of the second step, which is measured and takes longer.",
        "log-optimizer-stats": "Write to TensorBoard and W&B how large weights and updates are, "
        "how orthogonal Muon's are, and where an optimizer's time goes.",
    },
    "checkpoints": {
        "checkpoint-fresh-state": "Kinds of optimizer state that start fresh where a checkpoint "
        "lacks them, and are left out where it has more.",
        "checkpoint-momentum-from-adam": "Start Muon's momentum as Adam's first moment where a "
        "checkpoint has no momentum.",
    },
    "muon": {
        "muon-lr": "Largest learning rate of Muon's matrices; --lr if absent.",
        "muon-min-lr": "Smallest one; --min-lr if absent.",
        "muon-exempt-from-clipping": "Never scale the gradients of Muon's matrices down to "
        "--clip-grad.",
        "muon-orthogonalize-router": "Treat the weights of mixture-of-experts routers as matrices.",
        "muon-orthogonalize-excluded": "Treat matrices that modules mark with use_muon=False as "
        "such, too: a run of megatron-core 0.19 goes on with their momentum.",
        "muon-split-gated": "Gate and up projection of a fused gated MLP are two matrices.",
        "muon-split-mla": "Split the fused projections of multi-latent attention.",
        "muon-split-linear-attention": "Split the input projection of linear attention layers.",
        "muon-split-per-head": "Each head's rows of an attention projection are a matrix of their "
        "own.",
        "muon-algorithm": "How to orthogonalize; auto takes the cheaper of those that are accurate "
        "enough.",
        "muon-wave-mb": "MiB of whole matrices that one rank brings together at a time: less takes "
        "less memory, more keeps a GPU busier.",
        "muon-team-size": "Most ranks that compute one matrix together where there are more ranks "
        "than work: 1 for none.",
        "muon-overlap-step": "Compute updates while gradients are still reduced, and gather each "
        "bucket of parameters as soon as it is stepped.",
        "muon-momentum-dtype": "How momentum is kept between steps: in float32, or in fewer bits.",
        "muon-backend": "Whose kernels orthogonalize.",
    },
    "adaptive muon": {
        "adaptive-muon-moment2-method": "How updates are normalized.",
        "adaptive-muon-beta2": "Decay of the second moments.",
        "adaptive-muon-eps": "Smallest divisor of an update.",
        "adaptive-muon-bias-correction": "Let the first steps of AdaMuon and NAMO be no longer "
        "than later ones.",
    },
    "soap": {
        "soap-shampoo-beta": "Decay of the preconditioner's statistics.",
        "soap-precondition-frequency": "Steps between updates of the preconditioner.",
        "soap-use-kl-shampoo": "Use KL-Shampoo's preconditioner.",
    },
}
"""What ``--help`` says about the flags to add, by group and name."""

_STORE_TRUE = {"action": "store_true", "default": False}

_OPTIONS: dict[str, dict[str, Any]] = {
    "optimizer-defaults": {"choices": get_args(OptimizerDefaultsT), "default": "recommended"},
    "optimizer-config": {"metavar": "FILE"},
    "print-optimizer-routing": _STORE_TRUE,
    "log-optimizer-memory": _STORE_TRUE,
    "log-optimizer-stats": _STORE_TRUE,
    "checkpoint-fresh-state": {"metavar": "KEY", "nargs": "+", "default": ()},
    "checkpoint-momentum-from-adam": _STORE_TRUE,
    "muon-backend": {"choices": backend_names()},
    "adaptive-muon-moment2-method": {"choices": CHOICES["adaptive_muon_moment2_method"]},
}
"""Arguments of ``add_argument`` that do not follow from the type of the configuration's field."""

_FIELDS = field_types(EmergingOptimizerConfig)


def has_meaning(name: str) -> bool:
    """Whether a flag stands for anything: not all releases of megatron-core have all its fields."""
    return name in _OPTIONS or name.replace("-", "_") in _FIELDS


def options(name: str) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a flag; the default is the configuration's."""
    if name in _OPTIONS:
        return _OPTIONS[name]
    field = _FIELDS[name.replace("-", "_")]
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"choices": field.choices} if field.choices else {"type": field.type}
