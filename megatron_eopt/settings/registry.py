"""Which optimizers there are beyond Adam and SGD, and how each is made from a configuration.

Optimizers come from three places: this package's own, everything emerging-optimizers registers, and
packages that declare an entry point in the group ``megatron_eopt.optimizers``.
"""

import functools
import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError, check_choice
from megatron_eopt.base.names import STANDARD_OPTIMIZERS
from megatron_eopt.base.upstream import found

logger = logging.getLogger(__name__)

Overrides = Mapping[ParamKey, Mapping[str, Any]]
"""Settings of some of the parameters, by what matches these."""

ENTRY_POINTS = "megatron_eopt.optimizers"
"""Entry-point group through which an installed package adds optimizers."""

StateLayoutT = Literal["element_wise", "matrix_update", "matrix_state"]
"""What of an optimizer needs whole matrices.

``element_wise``: nothing, each number is updated by itself, so any shape and any cut will do.
``matrix_update``: the update; the state has the parameter's shape and may be cut anywhere (Muon).
``matrix_state``: the state too (SOAP).
"""

_entries: dict[str, "EmergingOptimizerEntry"] = {}


def is_nonlinear_or_embedding(param: torch.Tensor) -> bool:
    """Whether a parameter's own attributes say that it is no matrix for an emerging optimizer."""
    return bool(getattr(param, "is_embedding_or_output_parameter", False)) or param.dim() != 2


NOT_A_MATRIX = ParamKey(
    predicate=ParamPredicate(name="nonlinear_or_embedding", fn=is_nonlinear_or_embedding)
)
"""Stands for all that routing takes for no matrix, embedding tables of any kind included."""


def is_our_rule(key: ParamKey) -> bool:
    """Whether a key is :data:`NOT_A_MATRIX`, or megatron-core's of the same meaning.

    Predicates are compared by name, and another function may have ours.
    """
    rules = (is_nonlinear_or_embedding, found("_is_nonlinear_or_embedding"))
    return key == NOT_A_MATRIX and getattr(key.predicate, "fn", None) in rules


def init_state(opt: Any, config: Any = None) -> None:
    """Make every parameter's state exist before the first step, as loading needs it.

    Raises:
        ConfigurationError: If the optimizer has no method for it.
    """
    if not hasattr(opt, "_init_group"):
        rule = "must make the state exist before the first step, and the class has no _init_group"
        way_out = "Register the optimizer with an init_state_fn of its own"
        raise ConfigurationError("init_state_fn", type(opt).__name__, rule, way_out)
    for group in opt.param_groups:
        opt._init_group(group, skip_non_grad_params=False)


def default_param_overrides() -> dict[ParamKey, dict[str, Any]]:
    """Return the overrides that send to Adam what is no matrix."""
    return {NOT_A_MATRIX: {"optimizer": "adam"}}


@dataclass
class EmergingOptimizerEntry:
    """Everything needed to make one optimizer."""

    optimizer_cls: type  # A torch optimizer class
    # called as ``(optimizer, config)``; makes every parameter's state exist
    init_state_fn: Callable[..., None] = init_state
    # called as ``(config, model_chunks, pg_collection)``; returns the class's arguments. None means
    # the keyword contract of :mod:`megatron_eopt.settings.fields`
    config_to_kwargs: Callable[..., dict[str, Any]] | None = None
    # overrides that hold unless the user's say otherwise
    default_param_overrides: dict[ParamKey, dict[str, Any]] = field(
        default_factory=default_param_overrides
    )
    state_layout: StateLayoutT = "matrix_state"  # what of the optimizer needs whole matrices
    # prefixes of configuration fields, the own one first, then those it falls back to. Empty means
    # the registered name
    prefixes: tuple[str, ...] = ()
    # further fields that this optimizer or the factory uses on its behalf
    consumes: frozenset[str] = frozenset()
    # whether it draws random numbers in a step; ranks with copies then draw the same
    draws: bool = False


def register_optimizer(
    name: str, entry: EmergingOptimizerEntry | type | None = None, **fields: Any
) -> Any:
    """Make an optimizer reachable as ``OptimizerConfig(optimizer=name)`` and in overrides.

    Works as a call, with an entry or an optimizer class, and as a decorator of a class::

        @register_optimizer("mine", state_layout="element_wise")
        class Mine(torch.optim.Optimizer): ...

    Args:
        name: Name of the optimizer.
        entry: Its entry, or its class.
        **fields: Fields of :class:`EmergingOptimizerEntry`, where ``entry`` is no entry.

    Returns:
        The class, or a decorator.

    Raises:
        ConfigurationError: If the name is taken.
        ConfigurationTypeError: If ``entry`` is neither an entry nor a class.
    """
    if name in STANDARD_OPTIMIZERS or name in _entries:
        rule = "there is already an optimizer of this name"
        raise ConfigurationError("register_optimizer(name)", name, rule, "Choose another name")
    if entry is None:
        return lambda optimizer_cls: register_optimizer(name, optimizer_cls, **fields)
    if isinstance(entry, type):
        entry = EmergingOptimizerEntry(optimizer_cls=entry, **fields)
    if not isinstance(entry, EmergingOptimizerEntry):
        rule = "must be an EmergingOptimizerEntry or an optimizer class"
        way_out = "Wrap it in an EmergingOptimizerEntry"
        raise ConfigurationTypeError("register_optimizer(entry)", entry, rule, way_out)
    _entries[name] = entry
    return entry.optimizer_cls


def is_registered(name: str) -> bool:
    """Whether ``name`` is taken; loads nothing."""
    return name in _entries


def entries() -> dict[str, EmergingOptimizerEntry]:
    """Return all entries by name; what packages contribute is loaded at the first call."""
    for name, entry in _entries.items():
        if not isinstance(entry, EmergingOptimizerEntry):
            # of megatron-core's class: a caller has put it among ours
            _entries[name] = EmergingOptimizerEntry(
                entry.optimizer_cls,
                entry.init_state_fn,
                entry.config_to_kwargs,
                entry.default_param_overrides,
            )
    while points := _entry_points():
        point = points.pop(0)
        try:
            register_optimizer(point.name, point.load())
        except Exception as error:
            # no reason why a run with another optimizer should not start
            text = "optimizer %r cannot be had from %r of an installed package: %s: %s"
            logger.warning(text, point.name, point.value, type(error).__name__, error)
    return _entries


@functools.cache
def _entry_points() -> list[importlib.metadata.EntryPoint]:
    """Return those that have not been loaded."""
    return list(importlib.metadata.entry_points(group=ENTRY_POINTS))


def entry_of(name: str) -> EmergingOptimizerEntry:
    """Return the entry of ``name``; a ConfigurationError offers the nearest names otherwise."""
    known = entries()
    check_choice("optimizer", name, sorted({*known, *STANDARD_OPTIMIZERS}))
    return known[name]


def prefixes_of(name: str) -> tuple[str, ...]:
    """Return the prefixes of configuration fields of the optimizer ``name``, the own one first."""
    return (name,) if name in STANDARD_OPTIMIZERS else entry_of(name).prefixes or (name,)


def state_layout_of(name: str) -> StateLayoutT:
    """Return what of the optimizer ``name`` needs whole matrices; of Adam and SGD nothing does."""
    if name in STANDARD_OPTIMIZERS:
        return "element_wise"
    entry = entry_of(name)
    return "matrix_update" if steps_in_pieces(entry.optimizer_cls) else entry.state_layout


def is_muon(name: str) -> bool:
    """Whether the optimizer ``name`` is our Muon, or a subclass of it."""
    return name not in STANDARD_OPTIMIZERS and hasattr(
        entry_of(name).optimizer_cls, "steps_in_pieces"
    )


def steps_in_pieces(cls: type) -> bool:
    """Whether a class steps any pieces of parameters, as our Muon does, and says so."""
    in_pieces = getattr(cls, "steps_in_pieces", None)
    return in_pieces is not None and in_pieces()


def optimizer_names() -> tuple[str, ...]:
    """Return the names of all optimizers, sorted."""
    return tuple(sorted({*entries(), *STANDARD_OPTIMIZERS}))
