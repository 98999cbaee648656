"""The entries of this package's own optimizers and of emerging-optimizers'."""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from emerging_optimizers import registry as emerging_registry
from emerging_optimizers.orthogonalized_optimizers import Muon

from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.config_kwargs import (
    constructor_arguments,
    kwargs_from_config,
    weight_decay_kwargs,
)
from megatron_eopt.optimizers.initial_state import INITIALIZERS, init_state
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.registry import (
    EmergingOptimizerEntry,
    StateLayoutT,
    entry_of,
    is_registered,
    register_optimizer,
)

_EMERGING_MODULES = (
    "orthogonalized_optimizers",
    "scalar_optimizers",
    "soap",
    "psgd",
    "riemannian_optimizers",
)
"""Modules that register emerging-optimizers' optimizers when they are imported."""

_ELEMENT_WISE = frozenset({"lion", "laprop"})

_MATRIX_UPDATE = frozenset({"mop", "scion", "polargrad", "spel", "sinkhorn_muon", "muon_hyperball"})

_FACTORY_ARGUMENTS = (
    "scalar_optimizer",
    "lr",
    "min_lr",
    "exempt_from_clipping",
    "orthogonalize_router",
    "split_qkv",
    "split_gated",
    "split_mla",
    "split_linear_attention",
    "split_per_head",
)

MUON_FACTORY_FIELDS = frozenset(f"muon_{name}" for name in _FACTORY_ARGUMENTS)
"""Fields of Muon that the factory, not a constructor, uses."""


def qkv_split_shapes(model_config: Any) -> list[int]:
    """Return the rows of Q, K and V in one query group of a fused QKV weight.

    With an output gate its rows come after the query's.
    """
    head = model_config.kv_channels
    queries = model_config.num_attention_heads // model_config.num_query_groups * head
    gate = [queries] if getattr(model_config, "attention_output_gate", False) else []
    return [queries, *gate, head, head]


def muon_family_kwargs(
    optimizer_cls: type,
    prefixes: Sequence[str],
    config: Any,
    model_chunks: Sequence[Any],
    pg_collection: Any,
) -> dict[str, Any]:
    """Return the constructor arguments of one of this package's own optimizers.

    Args:
        optimizer_cls: ``TensorParallelMuon`` or a class with its arguments.
        prefixes: Prefixes of its fields, the own one first.
        config: An ``OptimizerConfig``.
        model_chunks: The model; its config has the sizes of fused QKV weights.
        pg_collection: Process groups.
    """
    kwargs = emerging_kwargs(optimizer_cls, prefixes, config, pg_collection)
    model_config = getattr(model_chunks[0], "config", None)
    kwargs["is_qkv_fn"] = _is_qkv
    kwargs["qkv_split_shapes"] = model_config and qkv_split_shapes(model_config)
    if "backend" not in kwargs:
        # A configuration of megatron-core's own class means megatron-core's iteration to the bit.
        kwargs["algorithm"] = "standard"
        if kwargs.get("tp_mode") != "distributed":
            kwargs["backend"] = "emerging_optimizers"
    return kwargs


def emerging_kwargs(
    optimizer_cls: type, prefixes: Sequence[str], config: Any, pg_collection: Any = None
) -> dict[str, Any]:
    """Return the constructor arguments of an optimizer that follows the keyword contract alone.

    ``betas`` are Adam's where the optimizer has none of its own.
    """
    kwargs = {
        **kwargs_from_config(optimizer_cls, prefixes, config),
        **weight_decay_kwargs(optimizer_cls, config),
    }
    arguments = constructor_arguments(optimizer_cls)
    if "betas" in arguments:
        kwargs.setdefault("betas", (config.adam_beta1, config.adam_beta2))
    if "pg_collection" in arguments:
        kwargs["pg_collection"] = pg_collection
    return kwargs


def constructor_kwargs(
    name: str, config: Any, model_chunks: Sequence[Any], pg_collection: Any
) -> dict[str, Any]:
    """Return the constructor arguments of the optimizer ``name``."""
    entry = entry_of(name)
    if entry.config_to_kwargs is not None:
        return entry.config_to_kwargs(config, model_chunks, pg_collection)
    prefixes = entry.prefixes or (name,)
    return emerging_kwargs(entry.optimizer_cls, prefixes, config, pg_collection)


def create(
    name: str,
    param_groups: list[dict[str, Any]],
    config: Any,
    model_chunks: Sequence[Any],
    pg_collection: Any,
) -> tuple[torch.optim.Optimizer, Callable[..., None]]:
    """Return the optimizer ``name`` for these groups, and the function that makes its state."""
    entry = entry_of(name)
    kwargs = constructor_kwargs(name, config, model_chunks, pg_collection)
    return entry.optimizer_cls(param_groups, **kwargs), entry.init_state_fn


def register_all() -> None:
    """Register what this package and emerging-optimizers bring; later calls do nothing."""
    if is_registered("muon"):
        return
    _register_muon("muon", TensorParallelMuon, ("muon",), "matrix_update")
    _register_muon(
        "adaptive_muon", TensorParallelAdaptiveMuon, ("adaptive_muon", "muon"), "matrix_state"
    )
    for module in _EMERGING_MODULES:
        importlib.import_module(f"emerging_optimizers.{module}")
    for name in emerging_registry.get_optimizer_name_list():
        if not is_registered(name):
            _register_emerging(name, emerging_registry.get_optimizer_cls(name))


def _register_muon(
    name: str, cls: type, prefixes: tuple[str, ...], state_layout: StateLayoutT
) -> None:
    entry = EmergingOptimizerEntry(
        cls,
        config_to_kwargs=functools.partial(muon_family_kwargs, cls, prefixes),
        state_layout=state_layout,
        prefixes=prefixes,
        consumes=MUON_FACTORY_FIELDS,
    )
    register_optimizer(name, entry)


def _register_emerging(name: str, cls: type) -> None:
    is_muon = issubclass(cls, Muon)
    layout: StateLayoutT = "matrix_state"
    if name in _ELEMENT_WISE:
        layout = "element_wise"
    elif name in _MATRIX_UPDATE:
        layout = "matrix_update"
    entry = EmergingOptimizerEntry(
        cls,
        init_state_fn=INITIALIZERS.get(name, init_state),
        state_layout=layout,
        prefixes=(name, "muon") if is_muon else (name,),
        consumes=MUON_FACTORY_FIELDS if is_muon else frozenset(),
    )
    register_optimizer(name, entry)


def _is_qkv(param: Any) -> bool:
    return bool(getattr(param, "is_qkv", False))
