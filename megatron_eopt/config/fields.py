"""The keyword contract: takes an optimizer's constructor arguments from configuration fields.

Argument ``x`` comes from the first field among ``<own prefix>_x``, ``<parent's prefix>_x`` and
``x``. A warning names changed fields with these prefixes that no constructor takes.
"""

import ast
import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from megatron_eopt.config.config import default_values

_MISSING: Any = object()
_OF_THE_RUN = ("lr", "min_lr", "weight_decay")


class FieldType(NamedTuple):
    """The values that a field accepts."""

    type: Any
    choices: tuple[str, ...] = ()  # the allowed values; empty for any value of the type
    optional: bool = False  # whether None is allowed


def type_of(hint: Any) -> FieldType:
    """Return the values that a field with this type hint accepts."""
    optional = False
    if get_origin(hint) in (Union, UnionType):
        optional = NoneType in get_args(hint)
        found = [item for item in get_args(hint) if item is not NoneType]
        if all(get_origin(item) is Literal for item in found):
            hint = Literal[*(name for item in found for name in get_args(item))]
        else:
            hint = found[0] if len(found) == 1 else Any
    if get_origin(hint) is Literal and all(isinstance(item, str) for item in get_args(hint)):
        return FieldType(str, get_args(hint), optional)
    return FieldType(hint, (), optional)


@cache
def field_types(config_cls: type) -> Mapping[str, FieldType]:
    """Return the values that each field of a dataclass accepts, by name."""
    hints = get_type_hints(config_cls)
    return {item.name: type_of(hints[item.name]) for item in dataclasses.fields(config_cls)}


def field_docs(config_cls: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, base classes included, as plain text."""
    docs: dict[str, str] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(config_cls.__mro__)):
        # Python keeps no docstrings of fields, so they are read from the source
        (source,) = ast.parse(inspect.getsource(cls)).body
        for field, doc in pairwise(ast.iter_child_nodes(source)):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                text = ast.literal_eval(doc.value).replace("``", "")
                docs[ast.unparse(field.target)] = " ".join(text.split())
    return docs


@cache
def constructor_parameters(optimizer_cls: type) -> Mapping[str, inspect.Parameter]:
    """Return a class's constructor arguments by name, following ``**kwargs`` to its bases.

    Their annotations are types, or ``inspect.Parameter.empty``.
    """
    found: dict[str, inspect.Parameter] = {}
    for init in (vars(cls)["__init__"] for cls in optimizer_cls.__mro__ if "__init__" in vars(cls)):
        parameters = inspect.signature(init).parameters.values()
        try:
            hints = get_type_hints(init)
        except (NameError, TypeError):
            hints = {}  # some are for type checkers only
        for one in parameters:
            variable = one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
            if not variable and one.name not in ("self", "params"):
                hint = hints.get(one.name, one.empty)
                found.setdefault(one.name, one.replace(annotation=hint))
        # without ``**kwargs``, the arguments of its bases cannot be passed
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def kwargs_from_config(
    optimizer_cls: type, prefix: str | Sequence[str], config: object
) -> dict[str, Any]:
    """Return the constructor arguments for which ``config`` has a field.

    Of several prefixes, the most specific comes first.
    """
    prefixes = (prefix,) if isinstance(prefix, str) else tuple(prefix)
    names = constructor_parameters(optimizer_cls)
    return {name: found[1] for name in names if (found := _look_up(name, prefixes, config))}


def set_arguments(
    optimizer_cls: type, prefixes: Sequence[str], config: object
) -> dict[str, tuple[str, Any]]:
    """Return the field of ``config`` that sets each constructor argument, and its value.

    Betas that no field sets are Adam's. Two fields, such as ``lion_beta1`` and ``lion_beta2``, are
    called ``lion_beta``.
    """
    found: dict[str, tuple[str, Any]] = {}
    parameters = constructor_parameters(optimizer_cls)
    for name in parameters:
        setting = _look_up(name, prefixes, config)
        if setting is None and name == "betas":
            setting = _look_up(name, ("adam",), config)
        if setting is not None:
            found[name] = setting
    mode, extra = found.get("scale_mode"), found.get("extra_scale_factor")
    if mode and extra and mode[1] == "adamw_rms":
        known = type_of(parameters["scale_mode"].annotation).choices
        if known and "adamw_rms" not in known:
            # the same factor in the words of emerging-optimizers' own classes
            found["scale_mode"] = (mode[0], "spectral")
            if type(extra[1]) in (int, float):  # otherwise a check that follows raises an error
                found["extra_scale_factor"] = (extra[0], 0.2 * extra[1])
    return found


def unconsumed(config: object, prefixes: Sequence[str], consumed: Iterable[str]) -> list[str]:
    """Return the fields with these prefixes that differ from their defaults and are unused."""
    consumed, in_use = set(consumed), tuple(f"{prefix}_" for prefix in prefixes)
    usual = default_values("megatron") | field_defaults(config)
    return [
        name
        for name in changed_fields(config, usual)
        if name.startswith(in_use) and name not in consumed
    ]


def consumed_fields(optimizer_cls: type, prefixes: Sequence[str]) -> set[str]:
    """Return the prefixed field names from which a constructor's arguments may come."""
    names = {*constructor_parameters(optimizer_cls)}
    if "betas" in names:
        names |= {"beta1", "beta2"}
    return {f"{prefix}_{name}" for prefix in prefixes for name in names}


def field_defaults(config: object) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields; an empty dict for other objects."""
    items = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in items
    }


def changed_fields(config: object, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's values that differ from the usual ones, or have none, by name."""
    return {n: value for n, value in vars(config).items() if usual.get(n, _MISSING) != value}


def _look_up(name: str, prefixes: Sequence[str], config: object) -> tuple[str, Any] | None:
    """Return the name and the value of the field that sets an argument."""
    for prefix in prefixes:
        field = f"{prefix}_{name}"
        value = getattr(config, field, _MISSING)
        # a value of its own that is not set means the run's
        if value is not _MISSING and not (value is None and name in _OF_THE_RUN):
            return field, value
        betas = [getattr(config, f"{prefix}_beta{number}", _MISSING) for number in (1, 2)]
        if name == "betas" and _MISSING not in betas:
            return f"{prefix}_beta", tuple(betas)
    value = getattr(config, name, _MISSING)
    return None if value is _MISSING else (name, value)
