"""The values of flags that were not given."""

import argparse
import logging
from collections.abc import Mapping
from typing import Any

from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_eopt.assembly.config import EmergingOptimizerConfig
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import OLD_SPELLINGS

logger = logging.getLogger(__name__)

PREFIXES = ("muon_", "adaptive_muon_", "soap_")
"""Of the flags whose defaults are filled in here."""

_LIKE_MEGATRON: dict[str, object] = {
    "muon_algorithm": "standard",
    "muon_backend": "emerging_optimizers",
    "muon_split_gated": False,
    "muon_split_mla": False,
    "muon_split_linear_attention": False,
}
"""What fields that megatron-core lacks must be to do what it does."""


def fill(args: argparse.Namespace, trainers: Mapping[str, Any]) -> None:
    """Give every optimizer flag of ``args`` that is still None its default.

    Args:
        args: What was parsed; flags that were not given are None.
        trainers: The trainer's defaults.

    Raises:
        ConfigurationError: If an old spelling and the present one were both given and disagree.
    """
    _resolve_old_spellings(args)
    defaults = _defaults(args.optimizer_defaults, trainers)
    for dest, default in defaults.items():
        if dest.startswith(PREFIXES) and getattr(args, dest, None) is None:
            setattr(args, dest, default)
    if not getattr(args, "use_layer_wise_param_layout", True):
        logger.info(
            "--no-use-layer-wise-param-layout has no effect: matrices need no layout of their own"
        )


def _defaults(whose: str, trainers: Mapping[str, Any]) -> dict[str, Any]:
    recommended = dict(vars(EmergingOptimizerConfig()))
    if whose == "recommended":
        return recommended
    return {**recommended, **_LIKE_MEGATRON, **vars(OptimizerConfig()), **trainers}


def _resolve_old_spellings(args: argparse.Namespace) -> None:
    for old, new in OLD_SPELLINGS.items():
        given = getattr(args, f"muon_{old}", None)
        present = getattr(args, f"muon_{new}", None)
        if given is None:
            continue
        if present not in (None, given):
            raise ConfigurationError(
                f"--muon-{old.replace('_', '-')}",
                given,
                f"is an old spelling of --muon-{new.replace('_', '-')}, which says {present!r}",
                "Give one of them",
            )
        setattr(args, f"muon_{new}", given)
        setattr(args, f"muon_{old}", None)
