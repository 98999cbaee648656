"""Adds the flags to the trainer's parser and builds the configuration from the parsed values.

A value comes from the command line, else from the file of ``--optimizer-config``, else from the
defaults that ``--optimizer-defaults`` names.
"""

import argparse
import dataclasses
import logging
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.core import optimizer as megatron_optimizer

from megatron_eopt.arguments.flags import (
    OURS,
    choices_of_trainer_flags,
    coefficients,
    groups,
    options,
)
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.imports import import_file
from megatron_eopt.base.names import IN_RANK_FILES
from megatron_eopt.wrappers.config import EmergingOptimizerConfig, all_default_values
from megatron_eopt.wrappers.config_file import ALLOWED, read_optimizer_file
from megatron_eopt.config.retired import RETIRED, refusal, without_retired
from megatron_eopt.config.values import read_fields

logger = logging.getLogger(__name__)

_FILLED = {*OURS, *(name for name in ALLOWED if name.startswith("muon_"))}
"""The fields whose defaults are set after parsing."""

_ABSENT = object()


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the optimizer flags to a parser and return it; a second call changes nothing.

    Use it as the ``extra_args_provider`` of ``megatron.training``. Flags that the trainer already
    has get our choices. Defaults are set after parsing, because they depend on
    ``--optimizer-defaults`` and ``--optimizer-config``.
    """
    known = {action.dest: action for action in parser._actions}
    if "optimizer_defaults" in known:
        return parser
    _set_choices(parser)
    for title, flags in groups().items():
        group = parser.add_argument_group(title=f"{title} (megatron-eopt)")
        for name, text in flags.items():
            if name.replace("-", "_") not in known:
                group.add_argument(f"--{name}", help=text, **options(name))
    if "muon_nesterov" in known:
        # the trainer's flag can only turn it on
        off: dict[str, Any] = {"dest": "muon_nesterov", "action": "store_false", "default": None}
        parser.add_argument("--no-muon-nesterov", help="Turn --muon-nesterov off.", **off)
    for name in RETIRED.keys() - known.keys():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, action=_Refusal, nargs="*", default=SUPPRESS, help=SUPPRESS)
    _fill_after_parsing(parser)
    return parser


def config_from_args(args: argparse.Namespace) -> tuple[EmergingOptimizerConfig, dict[Any, Any]]:
    """Return the optimizer's configuration and its overrides for the parsed flags.

    It replaces ``megatron.training.training.get_megatron_optimizer_config``.

    Args:
        args: Values from a parser that :func:`add_arguments` extended.
    """
    names = [item.name for item in dataclasses.fields(EmergingOptimizerConfig)]
    # a checkpoint's arguments may be those of an earlier version
    values = {n: value for n, value in without_retired(vars(args)).items() if n in names}
    config = EmergingOptimizerConfig(**read_fields(EmergingOptimizerConfig, values))
    if getattr(args, "ckpt_format", None) == "torch":
        setattr(config, IN_RANK_FILES, True)
    return config, megatron_optimizer.get_standard_config_overrides(config)


class _Refusal(argparse.Action):
    """Raises the error for a retired flag."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        raise refusal(self.dest, " ".join(values), option_string or "")


def _set_choices(parser: argparse.ArgumentParser) -> None:
    choices = choices_of_trainer_flags()
    for action in parser._actions:
        action.choices = choices.get(action.dest, action.choices)
        if action.dest == "muon_coefficient_type":
            action.type, action.metavar = coefficients, "NAME|A,B,C"


def _import_files(argv: Sequence[str] | None) -> None:
    """Import the files of ``--import``; ``argv`` is None for ``sys.argv``."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--import", **options("import"))
    for path in vars(early.parse_known_args(argv)[0])["import"] or ():
        import_file(path)


def _fill_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Make ``parser`` set the defaults of flags that were not given after parsing."""
    actions = [action for action in parser._actions if action.dest in _FILLED]
    trainers = {a.dest: a.default for a in actions if a.default is not None}
    for action in actions:
        # so that ``_fill`` can tell flags that were not given
        action.default = None
    parse_known_args = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        argv = None if args is None else list(args)
        _import_files(argv)
        # once more, because an imported file may have registered an optimizer
        _set_choices(parser)
        preset = {} if namespace is None else dict(vars(namespace))
        parsed, rest = parse_known_args(argv, namespace)
        if parsed.optimizer_config is not None:
            _merge_file(parsed, {**preset, **_given_flags(parse_known_args, argv)})
        _fill(parsed, trainers)
        return parsed, rest

    # ``parse_args`` calls this method, too
    parser.parse_known_args = parse  # type: ignore[method-assign,assignment]


def _given_flags(parse: Callable[..., Any], argv: Sequence[str] | None) -> dict[str, Any]:
    """Return the values of the optimizer flags that were given on the command line, by parsed name.

    ``parse`` is the parser's ``parse_known_args``; ``argv`` is None for ``sys.argv``.
    """
    # argparse does not tell given values from defaults, so it parses again, with values in the
    # namespace that nobody can give
    parsed, _ = parse(argv, argparse.Namespace(**dict.fromkeys(ALLOWED, _ABSENT)))
    given = vars(parsed)
    return {name: given[name] for name in ALLOWED if given[name] is not _ABSENT}


def _merge_file(args: argparse.Namespace, given: Mapping[str, Any]) -> None:
    """Set the values of the ``--optimizer-config`` file in ``args``.

    Raises:
        ConfigurationError: If a flag in ``given`` has another value than the file.
    """
    if getattr(args, "yaml_cfg", None) is not None:
        rule = "has no effect with --yaml-cfg, which replaces all flags"
        hint = "Pass only one of them"
        raise ConfigurationError("--optimizer-config", args.optimizer_config, rule, hint)
    file = read_optimizer_file(args.optimizer_config)
    # only for its checks; the values are merged with the flags one by one
    file.config()
    for name, value in file.values.items():
        if name in given and given[name] != value:
            rule = f"{file.path} says {value!r}"
            flag = name.replace("_", "-")
            hint = "Remove the flag or the line"
            raise ConfigurationError(f"--{flag}", given[name], rule, hint)
        setattr(args, name, value)


def _fill(args: argparse.Namespace, trainers: Mapping[str, Any]) -> None:
    """Set the default of every optimizer flag that is None; ``trainers`` has the trainer's."""
    defaults = all_default_values(args.optimizer_defaults)
    if args.optimizer_defaults == "megatron":
        defaults |= trainers
    for dest, default in defaults.items():
        if dest in _FILLED and getattr(args, dest, None) is None:
            setattr(args, dest, default)
    if not getattr(args, "use_layer_wise_param_layout", True):
        text = "--no-use-layer-wise-param-layout has no effect: all optimizers share one layout"
        logger.info(text)
