"""Registry of the optimizers other than Adam and SGD, and how each is built.

They come from this package, from emerging-optimizers, and from packages with an entry point in the
group ``megatron_eopt.optimizers``.
"""

import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError, check_choice
from megatron_eopt.base.names import STANDARD_OPTIMIZERS
from megatron_eopt.config.keys import ParamKey, ParamPredicate, meaning_of

logger = logging.getLogger(__name__)

Overrides = Mapping[ParamKey, Mapping[str, Any]]
"""Settings for the parameters that each key matches."""

ENTRY_POINTS = "megatron_eopt.optimizers"
"""Entry-point group through which an installed package adds optimizers."""

StateLayoutT = Literal["element_wise", "matrix_update", "matrix_state"]
"""Which part of an optimizer needs full matrices.

``element_wise``: none, so parameters of any shape can be sharded anywhere (Adam, Lion).
``matrix_update``: the update; the state has the parameter's shape and can be sharded (Muon).
``matrix_state``: the update and the state (SOAP).
"""

_CLASSES = {"adamw": "adam", "fusedadam": "adam", "fusedsgd": "sgd"}
"""Further classes of the standard optimizers, in lower case."""

_entries: dict[str, "EmergingOptimizerEntry"] = {}


def is_nonlinear_or_embedding(param: torch.Tensor) -> bool:
    """Whether a parameter is not 2-D, or is marked as an embedding or output layer."""
    return bool(getattr(param, "is_embedding_or_output_parameter", False)) or param.dim() != 2


NOT_A_MATRIX = ParamKey(
    predicate=ParamPredicate(name="nonlinear_or_embedding", fn=is_nonlinear_or_embedding)
)
"""Matches every parameter that routing does not treat as a matrix, such as embeddings."""


def is_our_rule(key: ParamKey) -> bool:
    """Whether a key is :data:`NOT_A_MATRIX` or megatron-core's equivalent.

    Keys compare predicates by name only, so the function is compared too.
    """
    if meaning_of(key) != meaning_of(NOT_A_MATRIX):
        return False
    function = getattr(key.predicate, "fn", None)
    is_megatrons = getattr(function, "__module__", "").startswith("megatron.core.")
    return function is is_nonlinear_or_embedding or is_megatrons


def init_state(opt: Any, config: Any = None) -> None:
    """Create every parameter's state before the first step, so that a checkpoint can be loaded.

    Raises:
        ConfigurationError: If the optimizer has no such method ``_init_group``.
    """
    try:
        # classes of torch have a method of this name with other arguments
        inspect.signature(opt._init_group).bind({}, skip_non_grad_params=False)
    except (AttributeError, TypeError) as error:
        rule = "cannot create the state before the first step"
        hint = (
            "Define _init_group(group, skip_non_grad_params=False) in this class, or pass "
            "init_state_fn to register_optimizer"
        )
        raise ConfigurationError("init_state_fn", type(opt).__name__, rule, hint) from error
    for group in opt.param_groups:
        opt._init_group(group, skip_non_grad_params=False)


def default_param_overrides() -> dict[ParamKey, dict[str, Any]]:
    """Return the overrides that assign parameters that are not matrices to Adam."""
    return {NOT_A_MATRIX: {"optimizer": "adam"}}


@dataclass
class EmergingOptimizerEntry:
    """How to build and route one optimizer."""

    optimizer_cls: type
    """A ``torch.optim.Optimizer``."""

    init_state_fn: Callable[..., None] = init_state
    """Called as ``(optimizer, config)``; creates every parameter's state."""

    config_to_kwargs: Callable[..., dict[str, Any]] | None = None
    """Called as ``(config, model_chunks, pg_collection)``; returns the constructor's arguments.
    None takes them from fields with the prefixes below."""

    default_param_overrides: dict[ParamKey, dict[str, Any]] = field(
        default_factory=default_param_overrides
    )
    """Settings for some parameters; a user's overrides take precedence. By default, parameters that
    are not matrices go to Adam."""

    state_layout: StateLayoutT = "matrix_state"
    """Which part needs full matrices: "matrix_state", "matrix_update" or "element_wise"."""

    prefixes: tuple[str, ...] = ()
    """Prefixes of its configuration fields, most specific first; empty means the name."""

    consumes: frozenset[str] = frozenset()
    """Further fields that have an effect with this optimizer. Empty means Muon's, for a class
    derived from ``TensorParallelMuon``."""

    draws: bool = False
    """Whether a step draws random numbers; ranks with copies of a weight then draw the same."""

    settings_cls: Any = None
    """Class with the same constructor whose objects make update rules over shards of parameters; by
    default the optimizer's own class."""

    def __post_init__(self) -> None:
        """Raise a ConfigurationError for what would have no effect."""
        if self.state_layout == "matrix_update" and self.init_state_fn is not init_state:
            rule = "is not called with state_layout='matrix_update'"
            hint = "Create the state in init of the class's update rule"
            raise ConfigurationError("init_state_fn", self.init_state_fn, rule, hint)
        if self.state_layout == "matrix_update" and self.draws:
            rule = "has no effect with state_layout='matrix_update'"
            hint = "Draw in the class's update rule, from a seed that all ranks share"
            raise ConfigurationError("draws", True, rule, hint)


class LateEntry(EmergingOptimizerEntry):
    """An entry whose class is imported when somebody asks for it.

    Args:
        path: Of the class, with its module.
        fields: Other fields of the entry.
    """

    name = ""  # under which it is registered, for messages

    def __init__(self, path: str, **fields: Any) -> None:
        self.path = path
        super().__init__(optimizer_cls=type(None), **fields)
        del self.optimizer_cls

    def __getattr__(self, name: str) -> Any:
        if name != "optimizer_cls":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        module, _, cls = self.path.rpartition(".")
        try:
            self.optimizer_cls = getattr(importlib.import_module(module), cls)
        except ImportError as error:
            package = module.partition(".")[0].replace("_", "-")
            rule = f"cannot be imported: {error}"
            hint = f"Install {package}"
            raise ConfigurationError("optimizer", self.name, rule, hint) from error
        return self.optimizer_cls


def arguments_cls_of(name: str) -> type:
    """Return the class whose constructor has the arguments of the optimizer ``name``."""
    entry = entry_of(name)
    return entry.settings_cls or entry.optimizer_cls


def path_of(entry: EmergingOptimizerEntry) -> str:
    """Return the path of an entry's class, without importing it."""
    cls = vars(entry).get("optimizer_cls")
    own = f"{cls.__module__}.{cls.__qualname__}" if cls is not None else ""
    return getattr(entry, "path", "") or own


def register_optimizer(
    name: str, entry: EmergingOptimizerEntry | type | None = None, **fields: Any
) -> Any:
    """Register an optimizer for ``OptimizerConfig(optimizer=name)`` and for overrides.

    Call it with an entry or an optimizer class, or use it as a class decorator:

        @register_optimizer("mine", state_layout="element_wise")
        class Mine(torch.optim.Optimizer): ...

    Args:
        name: Name of the optimizer.
        entry: Its entry or its class; None returns a decorator.
        **fields: Fields of :class:`EmergingOptimizerEntry`, unless ``entry`` is an entry.

    Returns:
        The class, or a decorator.

    Raises:
        ConfigurationError: If the name is already registered.
        ConfigurationTypeError: If ``entry`` is neither an entry nor a class.
    """
    if name in STANDARD_OPTIMIZERS or name in _entries:
        rule = "is already registered"
        raise ConfigurationError("register_optimizer(name)", name, rule, "Choose another name")
    if entry is None:
        return lambda optimizer_cls: register_optimizer(name, optimizer_cls, **fields)
    if isinstance(entry, type):
        entry = EmergingOptimizerEntry(optimizer_cls=entry, **fields)
    if not isinstance(entry, EmergingOptimizerEntry):
        rule = "must be an EmergingOptimizerEntry or an optimizer class"
        hint = "Wrap it in an EmergingOptimizerEntry"
        raise ConfigurationTypeError("register_optimizer(entry)", entry, rule, hint)
    _entries[name] = entry
    if isinstance(entry, LateEntry):
        entry.name = name
        return None
    return entry.optimizer_cls


@contextmanager
def registered(name: str, entry: EmergingOptimizerEntry | None) -> Iterator[None]:
    """Register an optimizer, if there is one, in a block."""
    if entry is not None:
        register_optimizer(name, entry)
    try:
        yield
    finally:
        if entry is not None:
            del _entries[name]


def is_registered(name: str) -> bool:
    """Whether ``name`` is registered, without loading entry points."""
    return name in _entries


def entries() -> dict[str, EmergingOptimizerEntry]:
    """Return all entries by name; the first call loads the entry points of packages."""
    for name, entry in _entries.items():
        if not isinstance(entry, EmergingOptimizerEntry):
            # a caller added an entry of megatron-core's class
            _entries[name] = EmergingOptimizerEntry(
                entry.optimizer_cls,
                entry.init_state_fn,
                entry.config_to_kwargs,
                entry.default_param_overrides,
            )
    # the cached list is emptied, so that a package that asks for entries while it is imported does
    # not import itself again
    while points := _entry_points():
        point = points.pop(0)
        try:
            register_optimizer(point.name, point.load())
        except Exception as error:
            # a run with another optimizer can still start
            text = "optimizer %r is not available: its entry point %r raised %s: %s"
            logger.warning(text, point.name, point.value, type(error).__name__, error)
    return _entries


@functools.cache
def _entry_points() -> list[importlib.metadata.EntryPoint]:
    """Return the entry points that have not been loaded."""
    return list(importlib.metadata.entry_points(group=ENTRY_POINTS))


def entry_of(name: str) -> EmergingOptimizerEntry:
    """Return the entry of ``name``, or raise a ConfigurationError that suggests near names."""
    known = entries()
    check_choice("optimizer", name, sorted({*known, *STANDARD_OPTIMIZERS}))
    return known[name]


def prefixes_of(name: str) -> tuple[str, ...]:
    """Return the field prefixes of the optimizer ``name``, most specific first."""
    return (name,) if name in STANDARD_OPTIMIZERS else entry_of(name).prefixes or (name,)


def consumed_by(name: str) -> frozenset[str]:
    """Return the fields, besides constructor arguments, that have an effect with an optimizer."""
    # the factory routes and splits parameters of a variant as Muon's
    return entry_of(name).consumes or (entry_of("muon").consumes if is_muon(name) else frozenset())


def name_of_class(text: str) -> str:
    """Return the name under which an optimizer class is registered, else the class's name.

    ``text`` is a class name in any case, as in ``type(optimizer).__name__``, or a registered name.
    """
    classes = tuple((n, path_of(it).rpartition(".")[2]) for n, it in entries().items())
    return _names_by_class(classes).get(text.lower(), text)


@functools.lru_cache(maxsize=1)
def _names_by_class(classes: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    by_class = {cls.lower(): name for name, cls in classes}
    return {**by_class, **_CLASSES, **{name: name for name in optimizer_names()}}


def state_layout_of(name: str) -> StateLayoutT:
    """Return which part of the optimizer ``name`` needs full matrices."""
    if name in STANDARD_OPTIMIZERS:
        return "element_wise"
    entry = entry_of(name)
    if steps_in_pieces(arguments_cls_of(name)):
        return "matrix_update"
    # a class that cannot update shards gets whole matrices, whatever it was registered as
    return "element_wise" if entry.state_layout == "element_wise" else "matrix_state"


def steps_matrices(name: str) -> bool:
    """Whether the optimizer ``name`` updates matrices, not single elements."""
    return state_layout_of(name) != "element_wise"


def is_muon(name: str) -> bool:
    """Whether the optimizer ``name`` is ``TensorParallelMuon`` or a subclass."""
    return name not in STANDARD_OPTIMIZERS and hasattr(arguments_cls_of(name), "steps_in_pieces")


def steps_in_pieces(cls: type) -> bool:
    """Whether a class declares that it can update shards of parameters, as our Muon does."""
    in_pieces = getattr(cls, "steps_in_pieces", None)
    return in_pieces is not None and in_pieces()


def looks_ahead(cls: type) -> bool:
    """Whether a class has an update rule that can compute before the gradient norm is known."""
    rule = getattr(cls, "update_rule_class", None)
    return rule is not None and rule.can_look_ahead()


def optimizer_names() -> tuple[str, ...]:
    """Return the names of all optimizers, sorted."""
    return tuple(sorted({*entries(), *STANDARD_OPTIMIZERS}))
