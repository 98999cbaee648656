"""Reads values by their declared types, the same for Python, files and flags.

A string is taken only where text is expected: the text "false" is not a truth value, and "0.9" is
not a number. A single string is also a sequence of one. Numbers may be of any library.
"""

import copy
from collections.abc import Callable, Mapping, Sequence, Set
from numbers import Integral, Real
from typing import Any, get_args, get_origin

import numpy as np
import torch

from megatron_eopt.base.errors import ConfigurationTypeError, check_choice
from megatron_eopt.config.config import TorchOptimizerConfig, is_config
from megatron_eopt.config.fields import FieldType, field_types, type_of
from megatron_eopt.config.retired import without_retired
from megatron_eopt.math.coefficients import KINDS, CoefficientsLike, own_triples

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}
"""Data types by their names in the trainer's flags."""

_NO: Any = object()


def read_value(argument: str, value: object, kind: FieldType) -> Any:
    """Return a value in its declared type.

    Raises:
        ConfigurationTypeError: If it has a type that cannot be used without a guess.
        ConfigurationError: If it is none of the allowed values.
    """
    if value is None and kind.optional:
        return None
    read = _reader_of(kind.type)
    found = value if read is None else read(value)
    if found is _NO:
        rule, hint = _WORDS.get(kind.type) or _words_of_sequence(kind.type)
        if isinstance(value, str):
            hint += ", without quotes"
        if value is None:
            hint += ", or leave it out"
        raise ConfigurationTypeError(argument, value, f"must be {rule}", hint)
    if kind.choices:
        check_choice(argument, found, kind.choices)
    return found


def read_config(config: Any) -> Any:
    """Return a configuration whose fields have their declared types.

    The result is ``config`` itself if they have already.

    Raises:
        ConfigurationTypeError: If it is no configuration, or a value has a wrong type.
        ConfigurationError: If a value is none of the allowed ones, or a setting is retired.
    """
    if not is_config(config):
        rule = "must be an optimizer configuration"
        raise ConfigurationTypeError("config", config, rule, "Pass a TorchOptimizerConfig")
    # an earlier version may have pickled it
    values = without_retired(vars(config))
    is_read = len(values) == len(vars(config))
    for name, kind in kinds_of(type(config)).items():
        given = values.get(name, _NO)
        if given is not _NO:
            found = read_value(name, given, kind)
            # a whole number serves as any number
            is_number = kind.type is float and type(given) is int
            # as text, because items may be arrays, whose comparison is an array
            is_same = type(found) is type(given) and (
                not isinstance(found, tuple) or repr(found) == repr(given)
            )
            if not (is_same or is_number):
                values[name], is_read = found, False
    if is_read:
        return config
    result = copy.copy(config)
    result.__dict__ = values
    return result


def read_fields(config_cls: type, values: Mapping[str, object]) -> dict[str, Any]:
    """Return fields of a configuration class in their declared types, by name."""
    kinds = field_types(config_cls)
    return {name: read_value(name, value, kinds[name]) for name, value in values.items()}


def kinds_of(config_cls: type) -> Mapping[str, FieldType]:
    """Return the types of a class's fields, of its base if they cannot be found out, and of ours.

    Callers may set our fields on megatron-core's class, too, and its fields to our values.
    """
    for cls in config_cls.__mro__:
        try:
            own, ours = field_types(cls), field_types(TorchOptimizerConfig)
            return own if issubclass(cls, TorchOptimizerConfig) else {**own, **ours}
        # a local class's annotations that are strings, or a base that is no dataclass
        except (NameError, TypeError):
            continue
    return field_types(TorchOptimizerConfig)


def _bool(value: object) -> Any:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    return bool(value) if isinstance(value, Integral) and value in (0, 1) else _NO


def _float(value: object) -> Any:
    # Python counts True as the number 1
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else _NO


def _int(value: object) -> Any:
    number = _float(value)
    if isinstance(value, Integral) and number is not _NO:
        return int(value)
    return int(number) if number is not _NO and number.is_integer() else _NO


def _str(value: object) -> Any:
    return value if isinstance(value, str) else _NO


def _dtype(value: object) -> Any:
    if isinstance(value, str):
        return DTYPES.get(value, _NO)
    return value if isinstance(value, torch.dtype) else _NO


def _coefficients(value: object) -> Any:
    triples = own_triples(value)
    return _str(value) if triples is None else triples


_READERS: dict[Any, Callable[[object], Any]] = {
    bool: _bool,
    float: _float,
    int: _int,
    str: _str,
    torch.dtype: _dtype,
    CoefficientsLike: _coefficients,
}

_WORDS = {
    bool: ("a truth value", "Give True or False"),
    float: ("a number", "Give a plain number"),
    int: ("an integer", "Give a whole number"),
    str: ("a string", "Give a name"),
    torch.dtype: ("a data type", f"Give a torch.dtype, or one of {', '.join(DTYPES)}"),
    CoefficientsLike: KINDS,
}


def _words_of_sequence(kind: Any) -> tuple[str, str]:
    items = get_args(kind)
    many = "any number of" if items[-1:] == (...,) else str(len(items))
    what = _WORDS.get(items[0], ("value", ""))[0].removeprefix("a ").removeprefix("an ")
    return f"a sequence of {many} {what}s", f"Give a tuple of {many} {what}s"


def _reader_of(kind: Any) -> Callable[[object], Any] | None:
    """Return what reads values of a type; None for types that are not checked."""
    if get_origin(kind) is not tuple:
        return _READERS.get(kind)
    items = get_args(kind)

    def read(value: object) -> Any:
        if isinstance(value, str) and items == (str, ...):
            return (value,)
        if isinstance(value, str | Mapping) or not isinstance(value, Sequence | Set | np.ndarray):
            return _NO
        # the order of a set of strings differs between processes
        given = sorted(value, key=str) if isinstance(value, Set) else list(value)
        kinds = items[:1] * len(given) if items[-1] is ... else items
        if len(kinds) != len(given):
            return _NO
        readers = [_reader_of(type_of(item).type) for item in kinds]
        found = [one(item) if one else item for one, item in zip(readers, given, strict=True)]
        return _NO if any(item is _NO for item in found) else tuple(found)

    return read
