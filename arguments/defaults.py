"""The values of flags that were not given."""

import argparse
import logging
from collections.abc import Mapping
from typing import Any

from megatron_eopt.assembly.default_values import default_values
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import OLD_SPELLINGS, OptimizerDefaultsT

logger = logging.getLogger(__name__)

PREFIXES = ("muon_", "adaptive_muon_", "soap_")
"""Of the flags whose defaults are filled in here."""


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


def _defaults(whose: OptimizerDefaultsT, trainers: Mapping[str, Any]) -> dict[str, Any]:
    values = default_values(whose)
    return {**values, **trainers} if whose == "megatron" else values


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
