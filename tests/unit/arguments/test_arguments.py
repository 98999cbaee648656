"""The command line: one surface, extended and never doubled, with two sets of defaults."""

import argparse
import dataclasses
import functools
from pathlib import Path

import pytest
from megatron.core.optimizer import OptimizerConfig
from megatron.training.arguments import add_megatron_arguments

from benchmarks.compare_optimizers.__main__ import checked
from benchmarks.compare_optimizers.__main__ import parser as of_comparison
from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.arguments import add_arguments, config_from_args
from tests.harness.each_rank import on_ranks

EXAMPLE = str(Path(__file__).resolve().parents[3] / "examples" / "my_optimizer.py")
PREFIXES = ("muon_", "adaptive_muon_", "soap_", "lion_")


@functools.cache
def parser() -> argparse.ArgumentParser:
    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def parse(*argv: str) -> argparse.Namespace:
    return parsed(*argv, "--lr", "0.1")


def parsed(*argv: str) -> argparse.Namespace:
    args = parser().parse_args([*argv])
    for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq"):
        delattr(args, f"{name}_dtype")  # validate_args turns these into dtypes
    return args


def test_recommended_defaults_are_the_own_class():
    config, overrides = config_from_args(parse("--optimizer", "muon"))
    expected = EmergingOptimizerConfig(optimizer="muon", lr=0.1)
    for item in dataclasses.fields(config):
        if item.name.startswith(PREFIXES):
            assert getattr(config, item.name) == getattr(expected, item.name), item.name
    assert len(overrides) == 1


def test_megatrons_defaults_are_the_trainers():
    config, _ = config_from_args(parse("--optimizer-defaults", "megatron"))
    trainer = add_megatron_arguments(argparse.ArgumentParser()).parse_args(["--lr", "0.1"])
    for item in dataclasses.fields(OptimizerConfig):
        if item.name.startswith(PREFIXES):
            stock = getattr(trainer, item.name, getattr(OptimizerConfig(), item.name))
            assert getattr(config, item.name) == stock, item.name
    assert not config.muon_split_gated


@pytest.mark.parametrize("defaults", ["megatron", "recommended"])
def test_given_flags_win(defaults):
    flags = "--muon-momentum 0.8 --no-muon-split-mla --muon-no-split-qkv --soap-shampoo-beta 0.5"
    config, _ = config_from_args(parse("--optimizer-defaults", defaults, *flags.split()))
    assert (config.muon_momentum, config.soap_shampoo_beta) == (0.8, 0.5)
    assert (config.muon_split_mla, config.muon_split_qkv) == (False, False)


# in another process, because an optimizer of a file stays registered
@pytest.mark.parametrize("first", ["--import", "--optimizer"])
@on_ranks(1)
def test_the_optimizer_of_a_file_can_be_chosen(first, tmp_path):
    flags = {"--import": EXAMPLE, "--optimizer": "sign_per_matrix"}
    args = parser().parse_args([first, flags.pop(first), *next(iter(flags.items()))])
    assert args.optimizer == "sign_per_matrix"
    own = ["--optimizers", args.optimizer, "--import", EXAMPLE, "--out", str(tmp_path)]
    _, settings = checked(*of_comparison().parse_known_args(own))
    assert list(settings.flags) == ["--import", EXAMPLE]


def test_a_file_that_cannot_be_imported_is_refused(tmp_path):
    (tmp_path / "json.py").touch()
    refused = {"absent.py": "must be an existing Python file", "json.py": "json exists"}
    for name, rule in refused.items():
        with pytest.raises(ConfigurationError, match=rule):
            parser().parse_args(["--import", str(tmp_path / name)])
