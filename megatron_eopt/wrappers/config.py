"""The configuration class that megatron-core's classes accept."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer.optimizer_config import (
    AdamOptimizerConfig,  # noqa: F401  re-exported
    OptimizerConfig,
    SGDOptimizerConfig,  # noqa: F401
)

from megatron_eopt.base.errors import ConfigurationTypeError
from megatron_eopt.base.names import STANDARD_OPTIMIZERS, OptimizerDefaultsT
from megatron_eopt.config.config import TorchOptimizerConfig, default_values


@dataclass
class EmergingOptimizerConfig(TorchOptimizerConfig, OptimizerConfig):
    """``OptimizerConfig`` with recommended defaults and more fields; each is also a flag."""


def all_default_values(whose: OptimizerDefaultsT) -> dict[str, Any]:
    """Return the defaults of the fields of both classes: the recommended or megatron-core's."""
    return dataclasses.asdict(EmergingOptimizerConfig()) | default_values(whose)


def check_config(config: object) -> None:
    """Raise a ConfigurationTypeError unless megatron-core's classes accept a configuration."""
    if not isinstance(config, OptimizerConfig):
        rule = "must be an OptimizerConfig"
        raise ConfigurationTypeError("config", config, rule, "Pass an EmergingOptimizerConfig")


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
