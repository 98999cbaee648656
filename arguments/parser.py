"""Extends the trainer's parser, and turns what it parsed into a configuration.

A flag's value comes from the command line, else from a file, else from whose defaults it says.
"""

import argparse
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core import optimizer as megatron_optimizer

from megatron_eopt.arguments.flags import choices_of_trainer_flags, groups, options
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.settings.config import EmergingOptimizerConfig, default_values
from megatron_eopt.settings.config_file import ALLOWED, read_optimizer_file

logger = logging.getLogger(__name__)

_PREFIXES = ("muon_", "adaptive_muon_", "soap_")
"""Of the flags whose defaults are filled in here."""

_ABSENT = object()


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to the trainer's, or any, parser and return it; a second call changes nothing.

    Works as the ``extra_args_provider`` of ``megatron.training``. Flags that the trainer has keep
    their place and get our choices. Flags that were not given get their defaults when the command
    line has been parsed, since these follow from ``--optimizer-defaults`` and
    ``--optimizer-config``.
    """
    known = {action.dest: action for action in parser._actions}
    if "optimizer_defaults" in known:
        return parser
    for dest, choices in choices_of_trainer_flags().items():
        if dest in known:
            known[dest].choices = choices
    for title, flags in groups().items():
        group = parser.add_argument_group(title=f"{title} (megatron-eopt)")
        for name, text in flags.items():
            if name.replace("-", "_") not in known:
                group.add_argument(f"--{name}", help=text, **options(name))
    _fill_after_parsing(parser)
    return parser


def config_from_args(args: argparse.Namespace) -> tuple[EmergingOptimizerConfig, dict[Any, Any]]:
    """Return the configuration and the overrides that the trainer's flags stand for.

    Takes the place of ``megatron.training.training.get_megatron_optimizer_config``. The class is
    always ours; with ``--optimizer-defaults megatron`` its fields hold megatron-core's defaults.
    What was parsed comes from a parser that :func:`add_arguments` extended; if it asks for what the
    optimizer cannot do, that is a ConfigurationError.
    """
    names = [item.name for item in dataclasses.fields(EmergingOptimizerConfig)]
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    # argparse makes lists
    values["checkpoint_fresh_state"] = tuple(values.get("checkpoint_fresh_state", ()))
    config = EmergingOptimizerConfig(**values)
    return config, megatron_optimizer.get_standard_config_overrides(config)


def _fill_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` tell given flags from defaults, which are filled in at the end."""
    actions = [action for action in parser._actions if action.dest.startswith(_PREFIXES)]
    trainers = {a.dest: a.default for a in actions if a.default is not None}
    for action in actions:
        action.default = None
    parse_known_args = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        argv = None if args is None else list(args)
        preset = {} if namespace is None else dict(vars(namespace))
        parsed, rest = parse_known_args(argv, namespace)
        if parsed.optimizer_config is not None:
            _merge_file(parsed, {**preset, **_given_flags(parse_known_args, argv)})
        _fill(parsed, trainers)
        return parsed, rest

    parser.parse_known_args = parse  # type: ignore[method-assign,assignment]


def _given_flags(parse: Callable[..., Any], argv: Sequence[str] | None) -> dict[str, Any]:
    """Return the optimizers' flags that were given, by parsed name, defaults left out.

    ``parse`` is the parser's own ``parse_known_args``, ``argv`` the command line (None: the
    process's).
    """
    parsed, _ = parse(argv, argparse.Namespace(**dict.fromkeys(ALLOWED, _ABSENT)))
    return {name: value for name in ALLOWED if (value := getattr(parsed, name)) is not _ABSENT}


def _merge_file(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
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
            flag = name.replace("_", "-")
            way_out = "Remove the flag or the line"
            raise ConfigurationError(f"--{flag}", given[name], rule, way_out)
        setattr(args, name, value)


def _fill(args: argparse.Namespace, trainers: Mapping[str, Any]) -> None:
    """Give every optimizer flag of ``args`` that is still None its default.

    ``trainers`` are the trainer's defaults.
    """
    defaults = default_values(args.optimizer_defaults)
    if args.optimizer_defaults == "megatron":
        defaults |= trainers
    for dest, default in defaults.items():
        if dest.startswith(_PREFIXES) and getattr(args, dest, None) is None:
            setattr(args, dest, default)
    if not getattr(args, "use_layer_wise_param_layout", True):
        text = (
            "--no-use-layer-wise-param-layout has no effect: matrices need no layout of their own"
        )
        logger.info(text)
