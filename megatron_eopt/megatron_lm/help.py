"""Help texts of Megatron's flags."""

import argparse


def with_printable_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let ``--help`` work although a text has a percent sign that argparse takes for a format.

    megatron-core 0.19.2 has one, at ``--moe-paged-stash-buffer-size-factor-cuda``.
    """
    for action in parser._actions:
        if action.help is None or action.help is argparse.SUPPRESS:
            continue
        try:
            action.help % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = action.help.replace("%", "%%")
    return parser
