"""Random malformed input ends in an error that explains itself, or it trains; nothing else.

One job of a worker loops over all examples of a kind, since a process of its own for each would
only measure imports. Examples are the same in every run.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.optimizer import OptimizerConfig, ParamKey

from megatron_eopt import (
    ConfigurationError,
    EmergingOptimizerConfig,
    get_megatron_optimizer,
)
from megatron_eopt.arguments import add_arguments, config_from_args
from megatron_eopt.settings.config_file import load_optimizer_config
from tests.functional.outcomes import EXPLAINED, Outcomes
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp

TIMEOUT_S = 500.0
MODEL = {"layers": 1, "hidden": 16, "heads": 2, "vocabulary": 16}


def check_all(examples: int, strategy: Any, attempt: Callable[[Any], None]) -> Outcomes:
    """Try many examples of a strategy."""
    outcomes = Outcomes()

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: Any) -> None:
        outcomes.add(example, functools.partial(attempt, example))

    run()
    return outcomes


# Configurations

# numbers far outside and just outside of bounds, other kinds of value, names that are almost right
VALUES = st.one_of(
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1.0, 1e308, -1e-9]),
    st.sampled_from([0, 1, -1, 2, 10**30, True, False, None]),
    st.sampled_from(["", "muon", "munon", "adam", "auto", "foo", "0.5", "true", "qkv"]),
    st.sampled_from([(), (1.0,), [], [0.9, 0.99], {}, {"a": 1}, b"x", object]),
    st.floats(0, 1),
    st.integers(-3, 12),
)
OPTIMIZERS = st.sampled_from(
    ["muon", "adam", "sgd", "lion", "soap", "adaptive_muon", "dist_muon", "moon", "", None, 3]
)
# what only GPUs or other builds have; their flags are the model's, and megatron-core checks them
NOT_OURS = ("fp8_", "timers", "config_logger_dir")
FIELDS = [
    item.name
    for item in dataclasses.fields(EmergingOptimizerConfig)
    if not item.name.startswith(NOT_OURS)
]
OURS = [name for name in FIELDS if name.startswith(("muon_", "adaptive_", "soap_", "lion_"))]
CONFIGS = st.fixed_dictionaries(
    {
        "own": st.booleans(),
        "late": st.booleans(),
        "optimizer": st.one_of(st.just("muon"), OPTIMIZERS),
        "fields": st.dictionaries(
            st.one_of(st.sampled_from(OURS), st.sampled_from(FIELDS)), VALUES, max_size=3
        ),
    }
)
OVERRIDES = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from(["*", "*.weight", "*norm*", "no such name", "output_layer.weight"]),
            st.sampled_from([None, 3, ("*.bias", "*.weight")]),
        ),
        st.one_of(
            st.dictionaries(
                st.sampled_from(
                    [
                        "optimizer",
                        "max_lr",
                        "min_lr",
                        "wd_mult",
                        "lr_mult",
                        "start_wd",
                        "params",
                        "momentum",
                        "betas",
                        "eps",
                        "lr",
                        "weight_decay",
                        "nesterov",
                        "foo",
                        "is_expert_parallel",
                        "default_config",
                        "group_id",
                        "optimizer_cpu_offload",
                    ]
                ),
                st.one_of(VALUES, OPTIMIZERS),
                max_size=2,
            ),
            VALUES,
        ),
    ),
    max_size=3,
)


def step_once(config: Any, overrides: Any = None) -> None:
    """Build the optimizer for a new model; do one step, which must leave finite weights."""
    torch.manual_seed(1)
    chunk = wrap_ddp(
        tiny_gpt(**MODEL), use_distributed_optimizer=bool(config.use_distributed_optimizer)
    )
    optimizer = get_megatron_optimizer(config, [chunk], overrides)
    for group in optimizer.param_groups:
        group["lr"] = min(group["max_lr"], 0.1)
    train_step([chunk], optimizer, [synthetic_batch(0, vocabulary=16)])
    for name, param in chunk.named_parameters():
        assert torch.isfinite(param).all(), name


def configure(example: dict[str, Any]) -> None:
    cls = EmergingOptimizerConfig if example["own"] else OptimizerConfig
    fields = {"lr": 0.01, "min_lr": 0.0, "optimizer": example["optimizer"]} | example["fields"]
    if not example["own"]:
        known = {item.name for item in dataclasses.fields(OptimizerConfig)}
        fields = {name: value for name, value in fields.items() if name in known}
    if example["late"]:
        config = cls(lr=0.01, optimizer="adam")
        for name, value in fields.items():
            setattr(config, name, value)
    else:
        config = made(cls, fields)
    step_once(config)


def made(cls: type, fields: dict[str, Any]) -> Any:
    """Make a configuration; what megatron-core's own class asserts is megatron-core's."""
    try:
        return cls(**fields)
    except EXPLAINED:
        raise
    except Exception as error:
        if cls is EmergingOptimizerConfig:
            raise
        raise ConfigurationError("OptimizerConfig", fields, "is refused", "-") from error


def override(example: list[tuple[Any, Any]]) -> None:
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.01, min_lr=0.0)
    overrides = {
        ParamKey(name=name) if isinstance(name, str | tuple) else name: values
        for name, values in example
    }
    step_once(config, overrides)


# Command lines and files

ARGV = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "--optimizer",
                "--muon-momentum",
                "--muon-tp-mode",
                "--muon-lr",
                "--muon-mode",
                "--muon-num-ns-steps",
                "--no-muon-split-gated",
                "--soap-shampoo-beta",
                "--lr",
                "--optimizer-defaults",
                "--muon-momentum-beta",
                "--checkpoint-fresh-state",
                "--muon-scalar-optimizer",
                "--use-distributed-optimizer",
                "--muon-nesterow",
            ]
        ),
        st.sampled_from(
            ["muon", "adam", "moon", "0.9", "nan", "-1", "inf", "auto", "megatron", "", "x y", "9"]
        ),
    ),
    max_size=6,
)
LINES = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(
                [
                    "optimizer",
                    "muon-momentum",
                    "muon_momentum",
                    "lr",
                    "bf16",
                    "muon-tp-mode",
                    "muon-num-ns-steps",
                    "weight-decay",
                    "optimizer-defaults",
                    "adam-beta1",
                    "?",
                    "main-params-dtype",
                    "use-distributed-optimizer",
                    "muon-split-gated",
                ]
            ),
            st.sampled_from(
                [
                    "muon",
                    "adam",
                    "0.9",
                    "-1",
                    ".nan",
                    ".inf",
                    "1e400",
                    "true",
                    "yes",
                    "[1, 2]",
                    "{a: 1}",
                    "",
                    "null",
                    "!!python/object:os.system x",
                    "&a 1",
                    "'0.9'",
                    "fp16",
                    "1_000",
                    "0x10",
                    "|\n  text",
                ]
            ),
        ).map(": ".join),
        st.text(max_size=12),
    ),
    max_size=5,
)


def command_line(argv: list[str]) -> None:
    """Parse as the trainer does, and build what was asked for."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser.parse_args(["--lr", "0.01", "--optimizer", "muon", *argv])
    except SystemExit as error:
        assert "error: " in said.getvalue()
        raise ConfigurationError("argv", argv, "is refused", "-") from error
    for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq"):
        delattr(args, f"{name}_dtype")  # validate_args turns these into dtypes
    args.bf16 = False
    step_once(*config_from_args(args))


def described(lines: list[str]) -> None:
    """Read an optimizer file, and build what it describes."""
    path = Path(_folder, "optimizer.yaml")
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    config = load_optimizer_config(path)
    step_once(dataclasses.replace(config, lr=0.01 if config.lr is None else config.lr))


_folder = ""
"""Where examples of this process keep their files."""

KINDS: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "configurations": (CONFIGS, configure),
    "overrides": (OVERRIDES, override),
    "command lines": (ARGV, command_line),
    "files": (LINES, described),
}


def job(kind: str, examples: int, folder: str) -> Outcomes:
    global _folder
    _folder = folder
    initialize_megatron()
    return check_all(examples, *KINDS[kind])


EXAMPLES = {"configurations": 70, "overrides": 40, "command lines": 25, "files": 25}


def check(kind: str, examples: int, folder: Path) -> Outcomes:
    (outcomes,) = run_ranks(1, job, kind, examples, str(folder), timeout=TIMEOUT_S)
    assert not outcomes.defects, "\n\n".join(outcomes.defects)
    return outcomes


@pytest.mark.parametrize("kind", KINDS)
def test_settings(kind, tmp_path):
    outcomes = check(kind, EXAMPLES[kind], tmp_path)
    # so that examples are not all alike
    assert outcomes.refused > 5
    assert outcomes.trained > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_many_settings(kind, tmp_path, record_property):
    outcomes = check(kind, 20 * EXAMPLES[kind], tmp_path)
    record_property("refused", outcomes.refused)
    record_property("trained", outcomes.trained)
