"""The values of fields that were not given, for either kind of defaults."""

import dataclasses
from typing import Any

from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_eopt.assembly.config import EmergingOptimizerConfig
from megatron_eopt.base.names import OptimizerDefaultsT

_LIKE_MEGATRON: dict[str, object] = {
    "muon_algorithm": "standard",
    "muon_backend": "emerging_optimizers",
    "muon_split_gated": False,
    "muon_split_mla": False,
    "muon_split_linear_attention": False,
}
"""What fields that megatron-core lacks must be to do what it does."""


def default_values(whose: OptimizerDefaultsT) -> dict[str, Any]:
    """Return the default of every field of :class:`EmergingOptimizerConfig`.

    Args:
        whose: The defaults recommended here, or those of megatron-core's class.
    """
    recommended = _fields(EmergingOptimizerConfig())
    if whose == "recommended":
        return recommended
    return {**recommended, **_LIKE_MEGATRON, **_fields(OptimizerConfig())}


def _fields(config: OptimizerConfig) -> dict[str, Any]:
    return {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
