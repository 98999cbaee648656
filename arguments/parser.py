"""Extends the trainer's parser."""

import argparse
from typing import Any

from megatron_eopt.arguments.defaults import PREFIXES, fill
from megatron_eopt.arguments.file import given_flags, merge_file
from megatron_eopt.arguments.flags import GROUPS, choices_of_trainer_flags


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this package's flags to ``parser`` and return it; a second call changes nothing.

    Works as the ``extra_args_provider`` of ``megatron.training``. Flags that the trainer has keep
    their place and get our choices. Flags that were not given get their defaults when the command
    line has been parsed, since these follow from ``--optimizer-defaults`` and
    ``--optimizer-config``.

    Args:
        parser: The trainer's parser, or any other.
    """
    known = {action.dest: action for action in parser._actions}
    if "optimizer_defaults" in known:
        return parser
    for dest, choices in choices_of_trainer_flags().items():
        if dest in known:
            known[dest].choices = choices
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title=f"{title} (megatron-eopt)")
        for flag in flags:
            if flag.dest not in known:
                group.add_argument(f"--{flag.name}", help=flag.text, **flag.options)
    _fill_after_parsing(parser)
    return parser


def _fill_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` tell given flags from defaults, which are filled in at the end."""
    trainers = _forget_defaults(parser)
    parse_known_args = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        argv = None if args is None else list(args)
        preset = {} if namespace is None else dict(vars(namespace))
        parsed, rest = parse_known_args(argv, namespace)
        if parsed.optimizer_config is not None:
            merge_file(parsed, given_flags(parse_known_args, argv, preset))
        fill(parsed, trainers)
        return parsed, rest

    parser.parse_known_args = parse  # type: ignore[method-assign,assignment]


def _forget_defaults(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the trainer's defaults of the optimizers' flags, having replaced them by None."""
    actions = [a for a in parser._actions if a.dest.startswith(PREFIXES)]
    trainers = {action.dest: action.default for action in actions}
    for action in actions:
        action.default = None
    return {dest: value for dest, value in trainers.items() if value is not None}
