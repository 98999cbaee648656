"""Keys of overrides: which parameters some settings are for.

Keys of megatron-core's classes of these names serve as well: they have the same attributes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from torch import Tensor

from megatron_eopt.base.names import OUTPUT_ATTRIBUTE


@dataclass(frozen=True)
class ParamPredicate:
    """A function of a parameter, compared by a name of its own."""

    name: str
    fn: Callable[[Tensor], bool] = field(compare=False)

    def __call__(self, param: Tensor) -> bool:
        """Return whether the parameter is meant."""
        return self.fn(param)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A function of a parameter and its name, compared by a name of its own."""

    name: str
    fn: Callable[[Tensor, str], bool] = field(compare=False)

    def __call__(self, param: Tensor, name: str) -> bool:
        """Return whether the parameter is meant."""
        return self.fn(param, name)


@dataclass(frozen=True)
class ParamKey:
    """Matches every parameter that any of its parts matches; each part may be a tuple."""

    name: str | tuple[str, ...] = ()
    """Shell-style pattern of the parameter's name."""

    attr: str | tuple[str, ...] = ()
    """Name of an attribute of the parameter that is true."""

    predicate: Any = ()
    """A :class:`ParamPredicate`."""

    with_name_predicate: Any = ()
    """A :class:`ParamWithNamePredicate`."""

    def matches(self, param: Tensor, param_name: str) -> bool:
        """Return whether a parameter of this name is meant."""
        return (
            any(fnmatch(param_name, pattern) for pattern in each(self.name))
            or any(getattr(param, attribute, False) for attribute in each(self.attr))
            or any(predicate(param) for predicate in each(self.predicate))
            or any(predicate(param, param_name) for predicate in each(self.with_name_predicate))
        )


PARTS = ("name", "attr", "predicate", "with_name_predicate")
"""Attributes of a key."""


def each(part: Any) -> tuple[Any, ...]:
    """Return what a part of a key has, one or several."""
    return part if isinstance(part, tuple) else (part,)


def is_key(key: object) -> bool:
    """Whether this is a key, of whichever package."""
    return all(hasattr(key, part) for part in (*PARTS, "matches"))


def meaning_of(key: Any) -> tuple[Any, ...]:
    """Return what equal keys have in common, of whichever package; predicates count by name."""
    return tuple(
        tuple(getattr(item, "name", item) for item in each(getattr(key, part))) for part in PARTS
    )


def without(overrides: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return the keys that have another meaning than all the others."""
    meant = set(map(meaning_of, others))
    return [key for key in overrides if meaning_of(key) not in meant]


def get_standard_config_overrides(config: Any) -> dict[ParamKey, dict[str, Any]]:
    """Return the overrides that megatron-core's function of this name returns.

    Biases and vectors have no weight decay, and ``decoupled_lr`` is the learning rate of embeddings
    and output layers.
    """
    if getattr(config, "apply_wd_to_qk_layernorm", False):
        key = ParamKey(with_name_predicate=ParamWithNamePredicate("s1_not_qkln", _not_of_qk))
    else:
        key = ParamKey(name="*.bias", predicate=ParamPredicate("param_len_1", _is_vector))
    overrides: dict[ParamKey, dict[str, Any]] = {key: {"wd_mult": 0.0}}
    rates = {"max_lr": config.decoupled_lr, "min_lr": config.decoupled_min_lr}
    if config.decoupled_lr is not None:
        given = {name: rate for name, rate in rates.items() if rate is not None}
        overrides[ParamKey(attr=OUTPUT_ATTRIBUTE)] = given
    return overrides


def _is_vector(param: Tensor) -> bool:
    return param.dim() == 1


def _not_of_qk(param: Tensor, name: str) -> bool:
    is_of_qk = "q_layernorm." in name or "k_layernorm." in name
    return (_is_vector(param) or name.endswith(".bias")) and not is_of_qk
