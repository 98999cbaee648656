"""From parsed flags to what the optimizer is built from."""

import argparse
import dataclasses
from typing import Any

from megatron.core import optimizer as megatron_optimizer

from megatron_eopt.assembly.config import EmergingOptimizerConfig


def config_from_args(args: argparse.Namespace) -> tuple[EmergingOptimizerConfig, dict[Any, Any]]:
    """Return the configuration and the overrides that the trainer's flags stand for.

    Takes the place of ``megatron.training.training.get_megatron_optimizer_config``. The class is
    always ours; with ``--optimizer-defaults megatron`` its fields hold megatron-core's defaults.

    Args:
        args: Parsed by a parser that :func:`~megatron_eopt.arguments.add_arguments` extended.

    Raises:
        ConfigurationError: If something was asked for that the optimizer cannot do.
    """
    names = [item.name for item in dataclasses.fields(EmergingOptimizerConfig)]
    config = EmergingOptimizerConfig(
        **{name: getattr(args, name) for name in names if hasattr(args, name)}
    )
    return config, megatron_optimizer.get_standard_config_overrides(config)
