"""An optimizer described by a YAML file.

A key is the name of a field of :class:`~megatron_eopt.EmergingOptimizerConfig`, which is the name
of its flag too, or ``optimizer-defaults``. What a run decides for the model as well (precision,
overlap, logging) is no part of an optimizer's description and is refused.

YAML's own rules turn ``on`` into a truth value and ``1e-3`` into text, so values are read as the
text that was written, and the type of their field says what it means.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import yaml  # type: ignore[import-untyped,unused-ignore]

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.base.names import OptimizerDefaultsT
from megatron_eopt.settings.config import EmergingOptimizerConfig, default_values
from megatron_eopt.settings.fields import FieldType, field_types, type_of
from megatron_eopt.settings.settings import resolve

DEFAULTS_KEY = "optimizer_defaults"

_RUNS_OWN = frozenset(
    {"fp16", "bf16", "params_dtype", "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"}
    | {"overlap_param_gather", "overlap_param_gather_with_optimizer_step"}
    | {"log_num_zeros_in_grad", "barrier_with_L1_time", "timers", "config_logger_dir"}
    | {"use_layer_wise_distributed_optimizer", "checkpoint_fresh_state"}
)
"""Fields that follow from what a run decides for the model too, or from other fields."""

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}
"""Data types by the names that the trainer's flags have for them."""

_ONE_A_LINE = "Write one 'name: value' a line"

_ALLOWED: dict[str, FieldType] = {
    name: kind
    for name, kind in field_types(EmergingOptimizerConfig).items()
    if name not in _RUNS_OWN
} | {DEFAULTS_KEY: type_of(OptimizerDefaultsT)}


class OptimizerFile(NamedTuple):
    """What a file says."""

    path: Path
    values: Mapping[str, Any]  # by key; data types by the names of the trainer's flags
    places: Mapping[str, str]  # file and line of each key

    def config(self) -> EmergingOptimizerConfig:
        """Return the configuration, checked as far as that is possible without a model."""
        given: dict[str, Any] = {
            name: _DTYPES[value] if _ALLOWED[name].type is torch.dtype else value
            for name, value in self.values.items()
        }
        values = default_values(given.pop(DEFAULTS_KEY, "recommended")) | given
        try:
            config = EmergingOptimizerConfig(**values)
            resolve(config)
        except (ConfigurationError, ConfigurationTypeError) as error:
            place = self.places.get(error.argument, str(self.path))
            error.args = (f"{place}: {error}",)
            raise
        except (AssertionError, RuntimeError, ValueError) as error:
            rule = f"megatron-core refuses it: {error}"
            raise _unusable(self.path, rule, "Change the file") from error
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
    """Return what a file says, each value of its field's type; raises all but errors of bounds."""
    path = Path(path)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for entry in _entries(path):
        name = entry.key.replace("-", "_")
        if name in places:
            rule = f"was given before, at {places[name]}"
            raise entry.error(rule, "Keep one (dashes and underscores are equal)")
        places[name] = entry.place
        values[name] = _value(entry, _field_type(entry, name))
    if "optimizer" not in values:
        rule = "does not say which optimizer it describes"
        raise _unusable(path, rule, "Add a line such as 'optimizer: muon'")
    return OptimizerFile(path, values, places)


def allowed_keys() -> tuple[str, ...]:
    """Return the names that a file may give, with underscores."""
    return tuple(_ALLOWED)


class _Entry(NamedTuple):
    """One line ``key: value``, both as written; ``plain`` unless the value is in quotes."""

    place: str
    key: str
    text: str
    plain: bool

    def error(self, rule: str, way_out: str) -> ConfigurationError:
        return ConfigurationError(f"{self.place}: {self.key}", self.text, rule, way_out)


def _entries(path: Path) -> Iterator[_Entry]:
    """Yield the entries of a file in their order."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        raise _unusable(path, rule, "Give the path of a YAML file, saved as UTF-8") from error

    def refuse(mark: Any, value: object, rule: str, way_out: str = _ONE_A_LINE) -> NoReturn:
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigurationError(place, value, rule, way_out)

    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
            if anchor or tag:
                sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
                written = f"{sign}{anchor}" if anchor else tag
                rule = "anchors, aliases and tags are not understood"
                refuse(event.start_mark, written, rule, "Write the value itself")
        root = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or getattr(error, "reason", str(error))
        refuse(getattr(error, "problem_mark", None), problem, "is not valid YAML")
    if root is None:
        refuse(None, "", "holds nothing", f"{_ONE_A_LINE}, 'optimizer' too")
    if not isinstance(root, yaml.MappingNode):
        refuse(root.start_mark, _shown(root), "must be a mapping of names to values")
    for key, value in root.value:
        if not isinstance(key, yaml.ScalarNode):
            refuse(key.start_mark, _shown(key), "is no name")
        place = f"{path}:{key.start_mark.line + 1}"
        entry = _Entry(place, key.value, _shown(value), getattr(value, "style", None) is None)
        if not isinstance(value, yaml.ScalarNode):
            raise entry.error("must be a single value", "Write it plainly")
        yield entry


def _shown(node: yaml.Node) -> str:
    return {"mapping": "a mapping", "sequence": "a list"}.get(node.id) or str(node.value)


_FORMS: dict[type, tuple[str, str, Callable[[str], Any], str]] = {
    bool: ("true or false", "true|false", "true".__eq__, "Write it so, in lower case"),
    int: ("a whole number", r"[-+]?(0|[1-9]\d*)", int, "Write it in plain decimal digits"),
    float: (
        "a number",
        r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|\.?inf",
        lambda text: float(text.replace(".inf", "inf")),
        "Write it like 0.02, 3e-4 or inf",
    ),
}
"""How values of a type are written: what they are called, pattern, conversion and way out."""


def _value(entry: _Entry, kind: FieldType) -> Any:
    if entry.plain and entry.text in ("", "null", "~"):
        if entry.text and kind.optional:
            return None
        rule = "cannot be null" if entry.text else "has no value"
        otherwise = "null for none" if kind.optional else "leave it out"
        raise entry.error(rule, f"Write a value, or {otherwise}")
    choices = tuple(_DTYPES) if kind.type is torch.dtype else kind.choices
    if choices and entry.text not in choices:
        raise entry.error(f"must be one of {', '.join(choices)}", "Choose one of these")
    if choices or kind.type is str:
        return entry.text
    called, pattern, convert, way_out = _FORMS[kind.type]
    if not entry.plain:
        raise entry.error(f"must be {called}, not text", "Remove the quotes")
    if not re.fullmatch(pattern, entry.text):
        raise entry.error(f"must be {called}", way_out)
    return convert(entry.text)


def _field_type(entry: _Entry, name: str) -> FieldType:
    if name in _ALLOWED:
        return _ALLOWED[name]
    if name == "use_layer_wise_distributed_optimizer":
        rule = "follows from the optimizer and use-distributed-optimizer"
        raise entry.error(rule, "Write use-distributed-optimizer: true")
    if name in _RUNS_OWN:
        way_out = f"Give the flag --{name.replace('_', '-')}, or set the configuration's field"
        raise entry.error("is the run's own, no part of an optimizer's description", way_out)
    near = difflib.get_close_matches(name, _ALLOWED, n=3)
    hint = f"Did you mean {' or '.join(item.replace('_', '-') for item in near)}"
    no_hint = "Keys are the names of the optimizers' flags"
    raise entry.error("is no setting of an optimizer", hint if near else no_hint)


def _unusable(path: Path, rule: str, way_out: str) -> ConfigurationError:
    return ConfigurationError("optimizer_config", str(path), rule, way_out)
