"""The flags, as data: one group per optimizer."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from megatron_eopt.base.names import (
    SCALAR_OPTIMIZERS,
    STANDARD_OPTIMIZERS,
    OptimizerDefaultsT,
    TpModeT,
)
from megatron_eopt.math import (
    AlgorithmT,
    CoefficientT,
    PrecisionT,
    ScaleModeT,
    backend_names,
)
from megatron_eopt.math.moments import Moment2MethodT
from megatron_eopt.optimizers.registry import optimizer_names

_SWITCH = argparse.BooleanOptionalAction


class _Tuple(argparse.Action):
    """Stores several values as a tuple, as configurations hold them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, tuple(values))


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: The flag without leading dashes.
        text: What ``--help`` says.
        options: Arguments of ``add_argument``; the default is the configuration's.
    """

    name: str
    text: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dest(self) -> str:
        """Name of the parsed value, and of the configuration's field."""
        return self.name.replace("-", "_")


def choices_of_trainer_flags() -> dict[str, tuple[str, ...]]:
    """Return, by parsed name, the choices of flags that the trainer's parser has already."""
    names = optimizer_names()
    old = tuple(f"dist_{name}" for name in names if name not in STANDARD_OPTIMIZERS)
    return {
        "optimizer": (*names, *old),
        "muon_scale_mode": get_args(ScaleModeT),
        "muon_fp32_matmul_prec": get_args(PrecisionT),
        "muon_coefficient_type": get_args(CoefficientT),
        "muon_tp_mode": get_args(TpModeT),
        "muon_scalar_optimizer": SCALAR_OPTIMIZERS,
    }


GROUPS: dict[str, tuple[Flag, ...]] = {
    "optimizer layer": (
        Flag(
            "optimizer-defaults",
            "Whose default values the flags have: megatron's own, or the recommended ones.",
            {"choices": get_args(OptimizerDefaultsT), "default": "recommended"},
        ),
        Flag(
            "optimizer-config",
            "YAML file that describes the optimizer; its keys are named like these flags.",
            {"metavar": "FILE", "default": None},
        ),
        Flag(
            "print-optimizer-routing",
            "Log which parameter goes to which optimizer, and why.",
            {"action": "store_true", "default": False},
        ),
    ),
    "checkpoints": (
        Flag(
            "verify-checkpoint",
            "Read all files of a checkpoint before loading it, and compare their digests.",
            {"action": _SWITCH, "default": True},
        ),
        Flag(
            "checkpoint-fresh-state",
            "Kinds of optimizer state that start fresh where a checkpoint lacks them, and are left "
            "out where it has more.",
            {"metavar": "KEY", "nargs": "+", "action": _Tuple, "default": ()},
        ),
        Flag(
            "checkpoint-momentum-from-adam",
            "Start Muon's momentum as Adam's first moment where a checkpoint has no momentum.",
            {"action": "store_true", "default": False},
        ),
        Flag(
            "print-state-checksum",
            "Print a checksum of model and optimizer after every load and save.",
            {"action": "store_true", "default": False},
        ),
    ),
    "muon": (
        Flag(
            "muon-lr", "Largest learning rate of Muon's matrices; --lr if absent.", {"type": float}
        ),
        Flag("muon-min-lr", "Smallest one; --min-lr if absent.", {"type": float}),
        Flag(
            "muon-exempt-from-clipping",
            "Never scale the gradients of Muon's matrices down to --clip-grad.",
            {"action": _SWITCH},
        ),
        Flag(
            "muon-orthogonalize-router",
            "Treat the weights of mixture-of-experts routers as matrices.",
            {"action": _SWITCH},
        ),
        Flag(
            "muon-split-gated",
            "Gate and up projection of a fused gated MLP are two matrices.",
            {"action": _SWITCH},
        ),
        Flag(
            "muon-split-mla",
            "Split the fused projections of multi-latent attention.",
            {"action": _SWITCH},
        ),
        Flag(
            "muon-split-linear-attention",
            "Split the input projection of linear attention layers.",
            {"action": _SWITCH},
        ),
        Flag(
            "muon-split-per-head",
            "Each head's rows of an attention projection are a matrix of their own.",
            {"action": _SWITCH},
        ),
        Flag(
            "muon-algorithm",
            "How to orthogonalize; auto takes the cheaper of those that are accurate enough.",
            {"choices": get_args(AlgorithmT)},
        ),
        Flag(
            "muon-backend",
            "Whose kernels orthogonalize.",
            {"choices": backend_names()},
        ),
        Flag(
            "muon-use-nesterov",
            "Old spelling of --muon-nesterov.",
            {"action": "store_true", "default": None},
        ),
        Flag("muon-mode", "Old spelling of --muon-tp-mode.", {"choices": get_args(TpModeT)}),
        Flag("muon-momentum-beta", "Old spelling of --muon-momentum.", {"type": float}),
    ),
    "adaptive muon": (
        Flag(
            "adaptive-muon-moment2-method",
            "How updates are normalized.",
            {"choices": get_args(Moment2MethodT)},
        ),
        Flag("adaptive-muon-beta2", "Decay of the second moments.", {"type": float}),
        Flag("adaptive-muon-eps", "Smallest divisor of an update.", {"type": float}),
        Flag(
            "adaptive-muon-bias-correction",
            "Let the first steps of AdaMuon and NAMO be no longer than later ones.",
            {"action": _SWITCH},
        ),
    ),
    "soap": (
        Flag("soap-shampoo-beta", "Decay of the preconditioner's statistics.", {"type": float}),
        Flag(
            "soap-precondition-frequency",
            "Steps between updates of the preconditioner.",
            {"type": int},
        ),
        Flag("soap-use-kl-shampoo", "Use KL-Shampoo's preconditioner.", {"action": _SWITCH}),
    ),
}
"""Flags to add, by group; fields of ``EmergingOptimizerConfig`` unless they are ours alone."""
