"""Where a flag's value comes from: the command line, else a file, else whose defaults it says."""

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.settings.config import default_values
from megatron_eopt.settings.config_file import allowed_keys, read_optimizer_file

logger = logging.getLogger(__name__)

PREFIXES = ("muon_", "adaptive_muon_", "soap_")
"""Of the flags whose defaults are filled in here."""

_ABSENT = object()


def given_flags(parse: Callable[..., Any], argv: Sequence[str] | None) -> dict[str, Any]:
    """Return the optimizers' flags that were given, by parsed name, defaults left out.

    ``parse`` is the parser's own ``parse_known_args``, ``argv`` the command line (None: the
    process's).
    """
    names = allowed_keys()
    parsed, _ = parse(argv, argparse.Namespace(**dict.fromkeys(names, _ABSENT)))
    return {name: value for name in names if (value := getattr(parsed, name)) is not _ABSENT}


def merge_file(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Set in ``args`` what the file of ``--optimizer-config`` says.

    That a flag of ``given``, those of ``args`` that were not left out, says something else is a
    ConfigurationError.
    """
    if getattr(args, "yaml_cfg", None) is not None:
        rule = "has no effect with --yaml-cfg, which replaces all flags"
        way_out = "Give one of them"
        raise ConfigurationError("--optimizer-config", args.optimizer_config, rule, way_out)
    file = read_optimizer_file(args.optimizer_config)
    file.config()
    for name, value in file.values.items():
        if name in given and given[name] != value:
            rule = f"{file.path} says {value!r}"
            way_out = "Remove the flag or the line"
            raise ConfigurationError(_flag(name), given[name], rule, way_out)
        setattr(args, name, value)


def fill(args: argparse.Namespace, trainers: Mapping[str, Any]) -> None:
    """Give every optimizer flag of ``args`` that is still None its default.

    ``trainers`` are the trainer's defaults.
    """
    defaults = default_values(args.optimizer_defaults)
    if args.optimizer_defaults == "megatron":
        defaults |= trainers
    for dest, default in defaults.items():
        if dest.startswith(PREFIXES) and getattr(args, dest, None) is None:
            setattr(args, dest, default)
    # which of the two there is depends on megatron-core's release
    flag = None
    if not getattr(args, "use_layer_wise_param_layout", True):
        flag = "--no-use-layer-wise-param-layout"
    if (layout := getattr(args, "layer_wise_param_layout", "padded")) != "padded":
        flag = f"--layer-wise-param-layout {layout}"
    if flag:
        logger.info("%s has no effect: matrices need no layout of their own", flag)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
