"""An optimizer described by a YAML file.

A key is the name of a field of :class:`~megatron_eopt.EmergingOptimizerConfig`, which is the name
of its flag too, or ``optimizer-defaults``. What a run decides for the model as well (precision,
overlap, logging) is no part of an optimizer's description and is refused.
"""

import copy
import dataclasses
import difflib
import math
import os
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from megatron_eopt.assembly.checks import check_values
from megatron_eopt.assembly.config import EmergingOptimizerConfig
from megatron_eopt.assembly.default_values import default_values
from megatron_eopt.assembly.meaning import resolve
from megatron_eopt.assembly.strict_yaml import Entry, read_entries
from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.base.names import OptimizerDefaultsT

DEFAULTS_KEY = "optimizer_defaults"

_RUNS_OWN = frozenset(
    {"fp16", "bf16", "params_dtype", "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"}
    | {"overlap_param_gather", "overlap_param_gather_with_optimizer_step"}
    | {"log_num_zeros_in_grad", "barrier_with_L1_time", "timers", "config_logger_dir"}
    | {"use_layer_wise_distributed_optimizer"}
)
"""Fields that follow from what a run decides for the model too, or from other fields."""

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}
"""Data types by the names that the trainer's flags have for them."""

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_INTEGER = re.compile(r"[-+]?(0|[1-9]\d*)")
_INFINITY = ("inf", ".inf")
_NOTHING = ("null", "~")


@dataclass(frozen=True)
class OptimizerFile:
    """What a file says.

    Attributes:
        path: The file.
        defaults: Whose defaults hold for fields that are not in the file; None if it does not say.
        values: The fields' values by name; data types by the names of the trainer's flags.
        places: File and line of each key.
    """

    path: Path
    defaults: OptimizerDefaultsT | None
    values: Mapping[str, Any]
    places: Mapping[str, str]

    def config(self) -> EmergingOptimizerConfig:
        """Return the configuration, checked as far as that is possible without a model.

        Raises:
            ConfigurationError: If a value, or a combination, cannot be honoured.
        """
        values = {**default_values(self.defaults or "recommended"), **self.values}
        for name, kind in _KINDS.items():
            if kind.type is torch.dtype and name in self.values:
                values[name] = _DTYPES[values[name]]
        try:
            config = EmergingOptimizerConfig(**values)
            # A learning rate may come from elsewhere, all else is the file's.
            complete = copy.copy(config)
            complete.lr = 0.0 if config.lr is None else config.lr
            check_values(complete, resolve(complete))
        except (ConfigurationError, ConfigurationTypeError) as error:
            place = self.places.get(error.argument, str(self.path))
            error.args = (f"{place}: {error}",)
            raise
        except (AssertionError, RuntimeError, ValueError) as error:
            raise ConfigurationError(
                "optimizer_config",
                str(self.path),
                f"megatron-core refuses it: {error}",
                "Change the file",
            ) from error
        return config


def load_optimizer_config(path: str | os.PathLike[str]) -> EmergingOptimizerConfig:
    """Return the configuration that a YAML file describes.

    What the run decides (``bf16``, ...) is set afterwards, with ``dataclasses.replace``.

    Args:
        path: A UTF-8 file with one ``name: value`` a line; dashes and underscores are equal.

    Raises:
        ConfigurationError: If a key is unknown, given twice or no optimizer's, ``optimizer`` is
            missing, a value is of the wrong kind or out of bounds, or it is not such a file.
        ConfigurationTypeError: If a value is of a kind that the optimizer cannot use.
    """
    return read_optimizer_file(path).config()


def read_optimizer_file(path: str | os.PathLike[str]) -> OptimizerFile:
    """Return what a file says, each value of its field's type.

    Raises:
        ConfigurationError: As :func:`load_optimizer_config`, but for checks of bounds.
    """
    path = Path(path)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for entry in read_entries(path):
        name = entry.key.replace("-", "_")
        if name in places:
            raise entry.error(
                f"was given before, at {places[name]}",
                "Keep one (dashes and underscores are equal)",
            )
        places[name] = entry.place
        values[name] = _value(entry, _kind_of(entry, name))
    if "optimizer" not in values:
        raise ConfigurationError(
            "optimizer_config",
            str(path),
            "does not say which optimizer it describes",
            "Add a line such as 'optimizer: muon'",
        )
    return OptimizerFile(path, values.pop(DEFAULTS_KEY, None), values, places)


@dataclass(frozen=True)
class _Kind:
    """Type of a field: one type, or a choice of names; perhaps None too."""

    type: Any
    choices: tuple[str, ...] = ()
    optional: bool = False


def _kind(hint: Any) -> _Kind:
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (item for item in get_args(hint) if item is not types.NoneType)
        optional = True
    if get_origin(hint) is Literal:
        return _Kind(str, get_args(hint), optional)
    if hint is torch.dtype:
        return _Kind(hint, tuple(_DTYPES), optional)
    return _Kind(hint, (), optional)


def _kinds() -> dict[str, _Kind]:
    hints = get_type_hints(EmergingOptimizerConfig)
    names = [item.name for item in dataclasses.fields(EmergingOptimizerConfig)]
    fields = {name: _kind(hints[name]) for name in names if name not in _RUNS_OWN}
    return {**fields, DEFAULTS_KEY: _kind(OptimizerDefaultsT)}


_KINDS = _kinds()


def allowed_keys() -> tuple[str, ...]:
    """Return the names that a file may give, with underscores."""
    return tuple(_KINDS)


def _kind_of(entry: Entry, name: str) -> _Kind:
    if name == "use_layer_wise_distributed_optimizer":
        raise entry.error(
            "follows from the optimizer and use-distributed-optimizer",
            "Write use-distributed-optimizer: true",
        )
    if name in _RUNS_OWN:
        raise entry.error(
            "is the run's own, since the model depends on it too",
            f"Give the flag --{name.replace('_', '-')}, or set the configuration's field",
        )
    if name not in _KINDS:
        near = difflib.get_close_matches(name, _KINDS, n=3)
        hint = " or ".join(item.replace("_", "-") for item in near)
        raise entry.error(
            "is no setting of an optimizer",
            f"Did you mean {hint}" if near else "Keys are the names of the optimizers' flags",
        )
    return _KINDS[name]


def _value(entry: Entry, kind: _Kind) -> Any:
    """Return the value of an entry, of its field's type.

    Raises:
        ConfigurationError: If it is of another kind.
    """
    if entry.text in ("", *_NOTHING) and not entry.quoted:
        if entry.text and kind.optional:
            return None
        raise entry.error(
            "has no value" if not entry.text else "cannot be null",
            "Write a value" + (", or null for none" if kind.optional else ", or leave it out"),
        )
    if kind.choices:
        if entry.text not in kind.choices:
            raise entry.error(f"must be one of {', '.join(kind.choices)}", "Choose one of these")
        return entry.text
    if kind.type is str:
        return entry.text
    if entry.quoted:
        raise entry.error(f"must be {_WORDS[kind.type]}, not text", "Remove the quotes")
    return _CONVERT[kind.type](entry)


def _to_bool(entry: Entry) -> bool:
    if entry.text not in ("true", "false"):
        raise entry.error(f"must be {_WORDS[bool]}", "Write it so, in lower case")
    return entry.text == "true"


def _to_int(entry: Entry) -> int:
    if not _INTEGER.fullmatch(entry.text):
        raise entry.error(f"must be {_WORDS[int]}", "Write it in plain decimal digits")
    return int(entry.text)


def _to_float(entry: Entry) -> float:
    if entry.text in _INFINITY:
        return math.inf
    if not _NUMBER.fullmatch(entry.text):
        raise entry.error(f"must be {_WORDS[float]}", "Write it like 0.02, 3e-4 or inf")
    return float(entry.text)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}
_CONVERT = {bool: _to_bool, int: _to_int, float: _to_float}
