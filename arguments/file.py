"""An optimizer described by a file, on the command line."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_eopt.assembly.config_file import DEFAULTS_KEY, allowed_keys, read_optimizer_file
from megatron_eopt.base.errors import ConfigurationError

_ABSENT = object()

ParseT = Callable[[Sequence[str] | None, argparse.Namespace], tuple[argparse.Namespace, list[str]]]


def given_flags(
    parse: ParseT, argv: Sequence[str] | None, preset: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the optimizers' flags that were given, by parsed name, defaults left out.

    Args:
        parse: The parser's own ``parse_known_args``.
        argv: The command line; None means the process's.
        preset: What the caller had set before parsing; it counts as given.
    """
    names = allowed_keys()
    parsed, _ = parse(argv, argparse.Namespace(**dict.fromkeys(names, _ABSENT)))
    values = {name: getattr(parsed, name) for name in names}
    found = {name: value for name, value in values.items() if value is not _ABSENT}
    return {**preset, **found}


def merge_file(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Set in ``args`` what the file of ``--optimizer-config`` says.

    Args:
        args: What was parsed.
        given: The flags among it that were given.

    Raises:
        ConfigurationError: If the file cannot be used, or a flag says something else.
    """
    if getattr(args, "yaml_cfg", None) is not None:
        raise ConfigurationError(
            "--optimizer-config",
            args.optimizer_config,
            "has no effect with --yaml-cfg, which replaces all flags",
            "Give one of them",
        )
    file = read_optimizer_file(args.optimizer_config)
    file.config()
    values = dict(file.values)
    if file.defaults is not None:
        values[DEFAULTS_KEY] = file.defaults
    for name, value in values.items():
        if name in given and given[name] != value:
            raise ConfigurationError(
                f"--{name.replace('_', '-')}",
                given[name],
                f"{file.places[name]} says {value!r}",
                "Remove the flag or the line",
            )
        setattr(args, name, value)
