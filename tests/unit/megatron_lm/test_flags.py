"""The trainer's parser while we are installed."""

import argparse
import contextlib
import io
import operator
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any
from unittest import mock

import pytest

from megatron_eopt import megatron_lm
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.megatron_lm.trainer import _check_helpers, validating_known_flags
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks

TRAINERS = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --micro-batch-size 1".split()
check = validating_known_flags(lambda args, defaults: args)


def parsed(flags: list[str], provider: Any = None) -> argparse.Namespace:
    argv = mock.patch.object(sys, "argv", ["script.py", *TRAINERS, *flags])
    with argv, megatron_lm.install():
        from megatron.training.arguments import parse_args

        return parse_args(provider)


def scripts_own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--answer", type=int, default=42)
    # one of ours, which must not be added twice
    parser.add_argument("--print-optimizer-routing", action="store_true")
    parser.set_defaults(transformer_impl="transformer_engine")
    return parser


@on_ranks(1)
def test_the_trainers_help_is_printed_with_its_percent_signs():
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(prog="train", allow_abbrev=False)
    parser.add_argument("--good", default=3, help="half is 50%%, the usual %(default)s; %(prog)s")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    text = megatron_lm.add_arguments(add_megatron_arguments(parser)).format_help()
    assert "--muon-tp-mode" in text
    assert "--moe-paged-stash-buffer-size-factor-cuda" in text
    assert "half is 50%, the usual 3; train" in text
    assert "--hidden " not in text


defaults_of = operator.attrgetter("optimizer_defaults", "muon_tp_mode", "muon_momentum")


@pytest.mark.tested_release
@on_ranks(1)
def test_a_script_that_does_not_know_us_gets_upstreams_defaults():
    assert defaults_of(parsed([])) == ("megatron", "blockwise", 0.9)


@on_ranks(1)
def test_a_script_that_adds_our_flags_keeps_our_defaults():
    assert defaults_of(parsed([], megatron_lm.add_arguments)) == ("recommended", "auto", 0.95)


@on_ranks(1)
def test_the_scripts_own_flags_and_defaults_are_respected():
    args = parsed(["--answer", "7", "--transformer-impl", "local"], scripts_own)
    assert (args.answer, args.optimizer_defaults) == (7, "megatron")
    with pytest.raises(ConfigurationError, match="--transformer-impl='transformer_engine'"):
        parsed([], scripts_own)


SAVES = {"async_save": True, "use_persistent_ckpt_worker": True}
MUON = {"optimizer": "muon", "transformer_impl": "local", "qk_clip": False}


@pytest.mark.parametrize(
    ("given", "needed", "message"),
    [
        (
            {**MUON, "optimizer_cpu_offload": True, "log_max_attention_logit": False},
            ("optimizer_cpu_offload", "async_save"),
            "would write off-loaded state",
        ),
        (
            {"optimizer": "adam", "transformer_impl": "", "use_megatron_fsdp": True}
            | {"async_strategy": "mcore"},
            ("use_megatron_fsdp", "async_save", "async_strategy"),
            "--async-strategy='mcore': fails at the",
        ),
    ],
    ids=["off-loaded state", "Megatron-FSDP"],
)
def test_saves_that_would_fail_are_refused(given, needed, message):
    with pytest.raises(ConfigurationError, match=message):
        check(argparse.Namespace(**given, **SAVES))
    for name in needed:
        args = argparse.Namespace(**{**given, **SAVES, name: False})
        assert check(args) is args


FSDP2 = {**MUON, "use_torch_fsdp2": True, "ckpt_format": "torch_dist"}
FSDP2 |= {"tensor_model_parallel_size": 1, "calculate_per_token_loss": False}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**FSDP2, "optimizer": "dist_muon"}, "--optimizer='dist_muon': .*--optimizer muon"),
        ({**FSDP2, "ckpt_format": "torch_dcp"}, "--ckpt-format='torch_dcp': .*torch_dist"),
        ({**FSDP2, "calculate_per_token_loss": True}, "--calculate-per-token-loss=True: "),
        ({**FSDP2, **SAVES, "tensor_model_parallel_size": 2}, "--tensor-model-parallel-size=2: "),
        (
            {**FSDP2, "optimizer": "adam", "save": "folder", "no_save_optim": None},
            "--ckpt-format='torch_dist': .*Megatron's adam.*torch_dcp",
        ),
        (
            {**MUON, "optimizer": "dist_muon", "use_megatron_fsdp": True},
            "--optimizer='dist_muon': .*use-megatron-fsdp.*--optimizer muon",
        ),
    ],
    ids=["buffers", "format", "tokens", "TP", "Megatron's state", "buffers, Megatron-FSDP"],
)
def test_flags_that_fsdp_cannot_serve_are_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        check(argparse.Namespace(**given))


WRONG = [
    ("--optimizer mouon", "argument --optimizer: 'mouon' is not one of its values. Did you mean "),
    ("--muon-momentun 0.9", "unrecognized arguments: --muon-momentun 0.9. Did you mean --muon-m"),
    ("--muon-tp-mode none", "'none' is not one of its values. Choose one of blockwise, "),
    ("--xyzzy", "unrecognized arguments: --xyzzy. script.py --help lists all flags"),
    ("--lr much", "argument --lr: invalid float value: 'much'. script.py --help"),
]


def said(flags: list[str], rank: str) -> str:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
        patch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            parsed(flags)
    return printed.getvalue()


@pytest.mark.parametrize(("flags", "message"), WRONG)
def test_a_misspelled_flag_is_answered_in_one_line(flags, message):
    first, second = (run_ranks(1, said, flags.split(), rank)[0] for rank in "01")
    assert message in first
    assert first.count("\n") == 1
    assert not second, "all ranks have the same flags"


def test_two_precisions_are_named():
    with pytest.raises(ConfigurationError, match="--fp16=True: cannot be combined with") as caught:
        check(argparse.Namespace(**MUON, fp16=True, bf16=True))
    assert caught.value.is_on_all_ranks


def test_what_megatron_would_refuse_it_is_not_shown_but_keeps():
    """Also if its check fails of something else."""
    hidden = ("optimizer_cpu_offload", "qk_clip", "log_max_attention_logit")
    asked = {"optimizer": "soap", "use_torch_fsdp2": True, **dict.fromkeys(hidden, True)}
    args = argparse.Namespace(**{**FSDP2, **asked})
    shown = {}

    def fails(args: argparse.Namespace, defaults: dict[str, Any]) -> None:
        shown.update(vars(args))
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        validating_known_flags(fails)(args)
    expected = {**asked, "optimizer": "adam", **dict.fromkeys(hidden, False)}
    assert {name: shown[name] for name in asked} == expected
    assert {name: getattr(args, name) for name in asked} == asked


def test_a_checkout_that_cannot_compile_its_helpers_is_refused_before_the_start(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    _check_helpers(tmp_path)  # no checkout: nothing to compile
    (tmp_path / "Makefile").touch()
    for name, status in (("make", 0), ("g++", 0), ("python3", 1)):
        with pytest.raises(ConfigurationError, match=rf"'{re.escape(name)}'.* missing"):
            _check_helpers(tmp_path)
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(ConfigurationError, match=r"\['pybind11'\] is missing"):
        _check_helpers(tmp_path)
    (tmp_path / "python3").write_text("#!/bin/sh\n")
    _check_helpers(tmp_path)
    (tmp_path / "python3").unlink()
    (tmp_path / f"helpers_cpp{EXTENSION_SUFFIXES[0]}").touch()
    _check_helpers(tmp_path)
