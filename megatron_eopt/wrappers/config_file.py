"""Reads an optimizer's settings from a YAML file.

A key is a field of :class:`~megatron_eopt.EmergingOptimizerConfig` or ``optimizer-defaults``, with
dashes or underscores. Settings of the whole run (precision, overlap, logging) raise an error.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml  # type: ignore[import-untyped,unused-ignore]
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_eopt.base.errors import ConfigurationError, did_you_mean
from megatron_eopt.base.names import OptimizerDefaultsT
from megatron_eopt.config.fields import FieldType, field_types, type_of
from megatron_eopt.config.retired import is_dropped
from megatron_eopt.config.settings import resolve
from megatron_eopt.config.values import DTYPES, read_fields, read_value
from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.wrappers.config import EmergingOptimizerConfig, all_default_values

DEFAULTS_KEY = "optimizer_defaults"

_RUNS_OWN = frozenset(
    {"fp16", "bf16", "params_dtype", "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"}
    | {"overlap_param_gather", "overlap_param_gather_with_optimizer_step"}
    | {"log_num_zeros_in_grad", "barrier_with_L1_time", "timers", "config_logger_dir"}
    | {"use_layer_wise_distributed_optimizer"}
)
"""Fields that belong to the whole run, or follow from other fields."""

ALLOWED: dict[str, FieldType] = {
    name: FieldType(str, tuple(DTYPES), kind.optional) if kind.type is torch.dtype else kind
    for name, kind in field_types(EmergingOptimizerConfig).items()
    if name not in _RUNS_OWN
} | {DEFAULTS_KEY: type_of(OptimizerDefaultsT)}
"""The values that a file may set, by names with underscores."""


class OptimizerFile(NamedTuple):
    """The contents of an optimizer file."""

    path: Path
    values: Mapping[str, Any]  # by field; data types by name

    def config(self) -> EmergingOptimizerConfig:
        """Return the configuration, with all checks that need no model."""
        given = dict(self.values)
        values = all_default_values(given.pop(DEFAULTS_KEY, "recommended")) | given
        try:
            config = EmergingOptimizerConfig(**read_fields(EmergingOptimizerConfig, values))
            resolve(config)
        except ConfigurationError as error:
            # the same error, with the file in front of its text
            error.args = (f"{self.path}: {error}",)
            raise
        except (AssertionError, RuntimeError, ValueError) as error:
            raise _unusable(self.path, f"megatron-core raised an error: {error}") from error
        return config


def load_optimizer_config(path: str | os.PathLike[str]) -> EmergingOptimizerConfig:
    """Return the configuration that a YAML file describes.

    Set the run's own fields, such as ``bf16``, afterwards with ``dataclasses.replace``.

    Args:
        path: A file with one ``name: value`` per line; names may have dashes or underscores.

    Raises:
        ConfigurationError: If the file cannot be read, a key is not an optimizer setting,
            ``optimizer`` is missing, or a value is wrong.
        ConfigurationTypeError: If a value has a type that the optimizer cannot use.
    """
    return read_optimizer_file(path).config()


def read_optimizer_file(path: str | os.PathLike[str]) -> OptimizerFile:
    """Return a file's settings, converted to their fields' types; bounds are not checked."""
    path = Path(path)
    try:
        read = OmegaConf.load(path)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise _unusable(path, f"cannot be read ({error})") from error
    if not isinstance(read, DictConfig):
        raise _unusable(path, "must be a mapping of names to values")
    values: dict[str, Any] = {}
    try:
        content: Any = OmegaConf.to_container(read, resolve=True)
        for key, value in content.items():
            name = str(key).replace("-", "_")
            argument = f"{path}: {name.replace('_', '-')}"
            if is_dropped(name, value, argument):
                continue
            _check_name(path, name, value)
            if name in values:
                rule = f"the file also has {values[name]!r} for it, with other dashes"
                raise ConfigurationError(argument, value, rule, "Remove one of the lines")
            values[name] = read_value(argument, value, ALLOWED[name])
    except OmegaConfBaseException as error:
        raise _unusable(path, f"has a wrong value: {error}") from error
    if "optimizer" not in values:
        raise _unusable(path, "does not say which optimizer: add a line such as 'optimizer: muon'")
    return OptimizerFile(path, values)


def _check_name(path: Path, name: str, value: object) -> None:
    if name in ALLOWED:
        return
    rule, flag = "is not an optimizer setting", name.replace("_", "-")
    hint = did_you_mean(
        name,
        ALLOWED,
        "Use the name of an optimizer flag without its leading dashes",
        shown=lambda item: item.replace("_", "-"),
    )
    if name in _RUNS_OWN:
        rule = "belongs to the run, not to the optimizer file"
        hint = f"Pass --{flag}, or set the field in Python"
    raise ConfigurationError(f"{path}: {flag}", value, rule, hint)


def _unusable(path: Path, rule: str) -> ConfigurationError:
    hint = "Write a YAML file with one 'name: value' per line"
    return ConfigurationError("optimizer_config", str(path), rule, hint)
