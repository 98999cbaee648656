"""An optimizer described by a YAML file.

A key is the name of a field of :class:`~megatron_eopt.EmergingOptimizerConfig`, which is the name
of its flag too, or ``optimizer-defaults``. What a run decides for the model as well (precision,
overlap, logging) is no part of an optimizer's description and is refused.

YAML's own rules turn ``on`` into a truth value and ``1e-3`` into text, so values are read as the
text that was written, and the type of their field says what it means.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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

_ALLOWED: dict[str, FieldType] = {
    name: kind
    for name, kind in field_types(EmergingOptimizerConfig).items()
    if name not in _RUNS_OWN
} | {DEFAULTS_KEY: type_of(OptimizerDefaultsT)}


@dataclasses.dataclass(frozen=True)
class OptimizerFile:
    """What a file says."""

    path: Path
    # whose defaults hold for fields that are not in the file; None if it does not say
    defaults: OptimizerDefaultsT | None
    # the fields' values by name; data types by the names of the trainer's flags
    values: Mapping[str, Any]
    places: Mapping[str, str]  # file and line of each key

    def config(self) -> EmergingOptimizerConfig:
        """Return the configuration, checked as far as that is possible without a model.

        Raises:
            ConfigurationError: If a value, or a combination, cannot be honoured.
        """
        values = {**default_values(self.defaults or "recommended"), **self.values}
        for name in self.values:
            if _ALLOWED[name].type is torch.dtype:
                values[name] = _DTYPES[values[name]]
        try:
            config = EmergingOptimizerConfig(**values)
            resolve(config, lr_may_follow=True)
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
    """Return what a file says, each value of its field's type.

    Raises:
        ConfigurationError: As :func:`load_optimizer_config`, but for checks of bounds.
    """
    path = Path(path)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for entry in _entries(path):
        name = entry.key.replace("-", "_")
        if name in places:
            raise entry.error(
                f"was given before, at {places[name]}",
                "Keep one (dashes and underscores are equal)",
            )
        places[name] = entry.place
        values[name] = _value(entry, name)
    if "optimizer" not in values:
        rule = "does not say which optimizer it describes"
        raise _unusable(path, rule, "Add a line such as 'optimizer: muon'")
    return OptimizerFile(path, values.pop(DEFAULTS_KEY, None), values, places)


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


class _Loader(yaml.SafeLoader):
    """Refuses what makes a value another one than the text that stands there."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        event = self.peek_event()
        anchor = getattr(event, "anchor", None)
        if anchor is not None or event.tag is not None:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            raise ConfigurationError(
                f"{self.name}:{event.start_mark.line + 1}",
                event.tag if anchor is None else f"{sign}{anchor}",
                "anchors, aliases and tags are not understood",
                "Write the value itself",
            )
        return super().compose_node(parent, index)


def _entries(path: Path) -> list[_Entry]:
    """Return the entries of a file in their order."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        raise _unusable(path, rule, "Give the path of a YAML file, saved as UTF-8") from error
    one_a_line = "Write one 'name: value' a line"
    try:
        loader = _Loader(text)
        loader.name = str(path)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = str(path) if mark is None else f"{path}:{mark.line + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", str(error))
        raise ConfigurationError(place, problem, "is not valid YAML", one_a_line) from error
    if root is None:
        raise ConfigurationError(str(path), "", "holds nothing", f"{one_a_line}, 'optimizer' too")
    if not isinstance(root, yaml.MappingNode):
        place = f"{path}:{root.start_mark.line + 1}"
        raise ConfigurationError(
            place, _shown(root), "must be a mapping of names to values", one_a_line
        )
    entries = []
    for key, value in root.value:
        place = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigurationError(place, _shown(key), "is no name", "Write 'name: value'")
        entry = _Entry(place, key.value, _shown(value), getattr(value, "style", None) is None)
        if not isinstance(value, yaml.ScalarNode):
            raise entry.error("must be a single value", "Write it plainly")
        entries.append(entry)
    return entries


def _shown(node: yaml.Node) -> str:
    return {"mapping": "a mapping", "sequence": "a list"}.get(node.id) or str(node.value)


class _Form(NamedTuple):
    """How values of a type are written."""

    name: str
    pattern: str
    convert: Callable[[str], Any]
    way_out: str


_FORMS = {
    bool: _Form(
        "true or false", "true|false", lambda text: text == "true", "Write it so, in lower case"
    ),
    int: _Form("a whole number", r"[-+]?(0|[1-9]\d*)", int, "Write it in plain decimal digits"),
    float: _Form(
        "a number",
        r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|\.?inf",
        lambda text: float(text.replace(".inf", "inf")),
        "Write it like 0.02, 3e-4 or inf",
    ),
}


def _value(entry: _Entry, name: str) -> Any:
    """Return the value of an entry, of its field's type."""
    kind = _field_type(entry, name)
    if entry.plain and entry.text in ("", "null", "~"):
        if entry.text and kind.optional:
            return None
        raise entry.error(
            "cannot be null" if entry.text else "has no value",
            "Write a value, or null for none"
            if kind.optional
            else "Write a value, or leave it out",
        )
    choices = tuple(_DTYPES) if kind.type is torch.dtype else kind.choices
    if choices and entry.text not in choices:
        raise entry.error(f"must be one of {', '.join(choices)}", "Choose one of these")
    if choices or kind.type is str:
        return entry.text
    form = _FORMS[kind.type]
    if not entry.plain:
        raise entry.error(f"must be {form.name}, not text", "Remove the quotes")
    if not re.fullmatch(form.pattern, entry.text):
        raise entry.error(f"must be {form.name}", form.way_out)
    return form.convert(entry.text)


def _field_type(entry: _Entry, name: str) -> FieldType:
    if name == "use_layer_wise_distributed_optimizer":
        raise entry.error(
            "follows from the optimizer and use-distributed-optimizer",
            "Write use-distributed-optimizer: true",
        )
    if name in _RUNS_OWN:
        raise entry.error(
            "is the run's own, no part of an optimizer's description",
            f"Give the flag --{name.replace('_', '-')}, or set the configuration's field",
        )
    if name not in _ALLOWED:
        near = difflib.get_close_matches(name, _ALLOWED, n=3)
        hint = " or ".join(item.replace("_", "-") for item in near)
        raise entry.error(
            "is no setting of an optimizer",
            f"Did you mean {hint}" if near else "Keys are the names of the optimizers' flags",
        )
    return _ALLOWED[name]


def _unusable(path: Path, rule: str, way_out: str) -> ConfigurationError:
    return ConfigurationError("optimizer_config", str(path), rule, way_out)
