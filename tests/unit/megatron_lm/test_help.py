"""The trainer's ``--help``."""

import argparse

from megatron_eopt.megatron_lm.help import with_printable_help
from tests.harness import run_ranks


def test_texts_with_percent_signs_are_printed_as_they_are() -> None:
    parser = argparse.ArgumentParser(prog="train")
    parser.add_argument("--odd", help="headroom (1.10 = 10%).")
    parser.add_argument("--good", default=3, help="half is 50%%, the usual %(default)s; %(prog)s")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    parser.add_argument("--bare")
    text = with_printable_help(parser).format_help()
    assert "headroom (1.10 = 10%)." in text
    assert "half is 50%, the usual 3; train" in text
    assert "--hidden" not in text


def trainers_help() -> str:
    from megatron.training.arguments import add_megatron_arguments

    from megatron_eopt import megatron_lm

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return megatron_lm.add_arguments(add_megatron_arguments(parser)).format_help()


def test_the_trainers_help_has_megatrons_flags_and_ours() -> None:
    (text,) = run_ranks(1, trainers_help)
    assert "--muon-tp-mode" in text
    assert "--moe-paged-stash-buffer-size-factor-cuda" in text
