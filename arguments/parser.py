"""Extends the trainer's parser, and turns what it parsed into a configuration."""

import argparse
import dataclasses
from typing import Any

from megatron.core import optimizer as megatron_optimizer

from megatron_eopt.arguments.flags import GROUPS, choices_of_trainer_flags, has_meaning, options
from megatron_eopt.arguments.values import PREFIXES, fill, given_flags, merge_file
from megatron_eopt.settings.config import EmergingOptimizerConfig


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
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title=f"{title} (megatron-eopt)")
        for name, text in flags.items():
            if name.replace("-", "_") not in known and has_meaning(name):
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
    actions = [action for action in parser._actions if action.dest.startswith(PREFIXES)]
    trainers = {a.dest: a.default for a in actions if a.default is not None}
    for action in actions:
        action.default = None
    parse_known_args = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        argv = None if args is None else list(args)
        preset = {} if namespace is None else dict(vars(namespace))
        parsed, rest = parse_known_args(argv, namespace)
        if parsed.optimizer_config is not None:
            merge_file(parsed, {**preset, **given_flags(parse_known_args, argv)})
        fill(parsed, trainers)
        return parsed, rest

    parser.parse_known_args = parse  # type: ignore[method-assign,assignment]
