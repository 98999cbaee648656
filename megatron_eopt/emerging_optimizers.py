"""Drop-in replacement for ``megatron.core.optimizer.emerging_optimizers``, with its signatures."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_eopt.base.errors import check_choice
from megatron_eopt.config import registry
from megatron_eopt.config.arguments import (
    constructed,
    emerging_kwargs,
    entry_kwargs,
    qkv_split_shapes,
)
from megatron_eopt.config.fields import kwargs_from_config
from megatron_eopt.config.registry import EmergingOptimizerEntry, register_optimizer
from megatron_eopt.math import coefficient_names
from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.wrappers.factory import as_megatron_cores

__all__ = [
    "_EMERGING_OPTIMIZERS",
    "EmergingOptimizerEntry",
    "TensorParallelAdaptiveMuon",
    "TensorParallelMuon",
    "_adaptive_muon_config_to_kwargs",
    "_create_emerging_optimizer",
    "_default_adam_based_eopt_config_to_kwargs",
    "_default_param_overrides_factory",
    "_eopt_init_state_fn",
    "_get_qkv_split_shapes",
    "_is_nonlinear_or_embedding",
    "_kwargs_from_config",
    "_muon_config_to_kwargs",
    "get_supported_coefficient_types",
    "register_optimizer",
    "validate_coefficient_type",
]

# the same dictionary, so that scripts that add entries to it register optimizers
_EMERGING_OPTIMIZERS = registry.entries()


def get_supported_coefficient_types() -> tuple[str, ...]:
    """Return the names of the coefficient sets for the Newton-Schulz iteration."""
    return coefficient_names()


def validate_coefficient_type(coefficient_type: str) -> None:
    """Raise a ``ValueError`` if no coefficient set has this name."""
    check_choice("coefficient_type", coefficient_type, coefficient_names())


def _default_param_overrides_factory() -> Any:
    return as_megatron_cores(registry.default_param_overrides())


_eopt_init_state_fn = registry.init_state
_is_nonlinear_or_embedding = registry.is_nonlinear_or_embedding
_get_qkv_split_shapes = qkv_split_shapes
_kwargs_from_config = kwargs_from_config
# from the entries at import time: later registrations do not change these names
_muon_config_to_kwargs = registry.entry_of("muon").config_to_kwargs
_adaptive_muon_config_to_kwargs = registry.entry_of("adaptive_muon").config_to_kwargs


def _create_emerging_optimizer(
    config: Any,
    param_groups: list[dict[str, Any]],
    eopt_name: str,
    model_chunks: Sequence[Any],
    pg_collection: Any,
) -> tuple[torch.optim.Optimizer, Any]:
    entry = registry.entry_of(eopt_name)
    kwargs = entry_kwargs(eopt_name, config, model_chunks, pg_collection)
    made = constructed(eopt_name, config, kwargs, param_groups, is_resolved=False)
    return made, entry.init_state_fn


def _default_adam_based_eopt_config_to_kwargs(
    eopt_name: str, config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    cls, prefixes = registry.arguments_cls_of(eopt_name), registry.prefixes_of(eopt_name)
    return emerging_kwargs(cls, prefixes, config, pg_collection)
