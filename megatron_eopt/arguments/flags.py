"""The flags and their help texts, which come from the configuration's fields."""

import argparse
from typing import Any, get_args

from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_eopt.base.names import STANDARD_OPTIMIZERS, OptimizerDefaultsT
from megatron_eopt.math import backend_names, coefficient_names
from megatron_eopt.math.coefficients import CoefficientsLike
from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.config.checks import CHOICES
from megatron_eopt.wrappers.config import EmergingOptimizerConfig
from megatron_eopt.config.fields import field_docs, field_types
from megatron_eopt.config.registry import optimizer_names


def choices_of_trainer_flags() -> dict[str, tuple[str, ...]]:
    """Return our choices for flags that the trainer's parser may already have, by parsed name."""
    names = optimizer_names()
    # resolving a configuration warns of these names
    old = tuple(f"dist_{name}" for name in names if name not in STANDARD_OPTIMIZERS)
    return {**CHOICES, "optimizer": (*names, *old)}


def coefficients(text: str) -> CoefficientsLike:
    """Read ``--muon-coefficient-type``: the name of a set, or three numbers for each triple."""
    try:
        numbers = [float(number) for number in text.split(",")]
        return tuple(zip(*[iter(numbers)] * 3, strict=True))
    except ValueError:
        if text not in coefficient_names():
            names = ", ".join(coefficient_names())
            rule = f"invalid choice: {text!r} (choose from {names}, or give numbers a,b,c)"
            raise argparse.ArgumentTypeError(rule) from None
        return text


_OF_NO_FIELD = {
    "optimizer-defaults": "Default values of the flags: the recommended ones, or Megatron's.",
    "optimizer-config": "YAML file with optimizer settings; its keys are the names of flags.",
    "import": "Python file that registers an optimizer. It is imported before flags are read.",
}
"""Help texts of flags that are not fields of the configuration."""

_GROUPS = {
    "optimizer layer": ("optimizer-", "import", "fused-", "cautious-", "matrix-", "print-", "log-"),
    "muon": ("muon-",),
    "adaptive muon": ("adaptive-muon-",),
    "soap": ("soap-",),
}
"""Name prefixes of the flags in each group."""


_FIELDS = field_types(EmergingOptimizerConfig)

OURS = tuple(
    name
    for name in _FIELDS
    if name not in field_types(OptimizerConfig) or name.startswith(("adaptive_muon_", "soap_"))
)
"""The fields that have flags of ours, unless the trainer has them."""


def groups() -> dict[str, dict[str, str]]:
    """Return the help texts of the flags to add, by group and name.

    The flags are our own fields, and the megatron-core fields for which the trainer may lack flags.
    """
    docs = field_docs(EmergingOptimizerConfig)
    texts = _OF_NO_FIELD | {name.replace("_", "-"): docs[name] for name in OURS}
    return {
        title: {name: text for name, text in texts.items() if name.startswith(prefixes)}
        for title, prefixes in _GROUPS.items()
    }


_STORE_TRUE = {"action": "store_true", "default": False}

_OPTIONS: dict[str, dict[str, Any]] = {
    "optimizer-defaults": {"choices": get_args(OptimizerDefaultsT), "default": "recommended"},
    "optimizer-config": {"metavar": "FILE"},
    "import": {"metavar": "FILE", "action": "append"},
    "print-optimizer-routing": _STORE_TRUE,
    "log-optimizer-stats": _STORE_TRUE,
    "muon-backend": {"choices": backend_names()},
    "adaptive-muon-moment2-method": {"choices": CHOICES["adaptive_muon_moment2_method"]},
}
"""Arguments of ``add_argument`` that do not follow from the field's type."""


def options(name: str) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a flag."""
    if name in _OPTIONS:
        return _OPTIONS[name]
    field = _FIELDS[name.replace("-", "_")]
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"choices": field.choices} if field.choices else {"type": field.type}
