"""The names of ``megatron.core.optimizer.emerging_optimizers``, with its signatures.

Scripts written for megatron-core's module work with this one after changing the import.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer_config import ParamKey

from megatron_eopt.base.errors import check_choice
from megatron_eopt.math.coefficients import COEFFICIENT_NAMES
from megatron_eopt.optimizers import config_kwargs as _config_kwargs
from megatron_eopt.optimizers import entries as _entries
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.initial_state import init_state
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.registry import (
    EmergingOptimizerEntry,
    default_param_overrides,
    entries,
    entry_of,
    register_optimizer,
)
from megatron_eopt.routing.routes import is_nonlinear_or_embedding

__all__ = [
    "EmergingOptimizerEntry",
    "TensorParallelAdaptiveMuon",
    "TensorParallelMuon",
    "get_supported_coefficient_types",
    "register_optimizer",
    "validate_coefficient_type",
]

_EMERGING_OPTIMIZERS = entries()


def get_supported_coefficient_types() -> tuple[str, ...]:
    """Return the names of the coefficient sets of the Newton-Schulz iteration."""
    return tuple(COEFFICIENT_NAMES)


def validate_coefficient_type(coefficient_type: str) -> None:
    """Raise a ``ValueError`` if no coefficient set has this name."""
    check_choice("coefficient_type", coefficient_type, COEFFICIENT_NAMES)


def _eopt_init_state_fn(opt: Any, config: Any = None) -> None:
    init_state(opt, config)


def _default_param_overrides_factory() -> dict[ParamKey, dict[str, Any]]:
    return default_param_overrides()


def _create_emerging_optimizer(
    config: Any,
    param_groups: list[dict[str, Any]],
    eopt_name: str,
    model_chunks: Sequence[Any],
    pg_collection: Any,
) -> tuple[torch.optim.Optimizer, Any]:
    return _entries.create(eopt_name, param_groups, config, model_chunks, pg_collection)


def _is_nonlinear_or_embedding(param: torch.Tensor) -> bool:
    return is_nonlinear_or_embedding(param)


def _get_qkv_split_shapes(model_cfg: Any) -> list[int]:
    return _entries.qkv_split_shapes(model_cfg)


def _kwargs_from_config(optimizer_cls: type, prefix: str, config: Any) -> dict[str, Any]:
    return _config_kwargs.kwargs_from_config(optimizer_cls, prefix, config)


def _muon_config_to_kwargs(
    config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    return _entries.constructor_kwargs("muon", config, model_chunks, pg_collection)


def _adaptive_muon_config_to_kwargs(
    config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    return _entries.constructor_kwargs("adaptive_muon", config, model_chunks, pg_collection)


def _default_adam_based_eopt_config_to_kwargs(
    eopt_name: str, config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    entry = entry_of(eopt_name)
    return _entries.emerging_kwargs(
        entry.optimizer_cls, entry.prefixes or (eopt_name,), config, pg_collection
    )
