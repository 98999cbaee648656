"""An optimizer described by a file: the same from the API and the command line, or an error."""

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig as MegatronConfig

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, load_optimizer_config
from megatron_eopt.arguments import config_from_args
from megatron_eopt.wrappers.config_file import ALLOWED, DEFAULTS_KEY
from tests.unit.arguments.test_arguments import parsed, parser

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture
def written(tmp_path):
    """Write a file and return its path."""

    def write(text: str | bytes) -> str:
        path = tmp_path / "optimizer.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def parse(*argv: str) -> argparse.Namespace:
    return parser().parse_args([*argv])


def from_flags(*argv: str) -> EmergingOptimizerConfig:
    return config_from_args(parsed(*argv))[0]


def test_values_are_what_was_written(written):
    config = load_optimizer_config(
        written(
            "optimizer: adaptive_muon\nlr: 1e-3\nmin_lr: 0\nweight-decay: .1\n"
            "muon-lr: 2E-2\nmuon_min_lr: null\nmuon-num-ns-steps: 7\nmuon-split-qkv: false\n"
            "muon-tp-mode: exchange\nadaptive-muon-moment2-method: 'normuon'\n"
            "grad-norm-skip-threshold: .inf\nuse-distributed-optimizer: true\n"
        )
    )
    assert config == EmergingOptimizerConfig(
        optimizer="adaptive_muon",
        lr=1e-3,
        min_lr=0.0,
        weight_decay=0.1,
        muon_lr=2e-2,
        muon_num_ns_steps=7,
        muon_split_qkv=False,
        muon_tp_mode="exchange",
        adaptive_muon_moment2_method="normuon",
        use_distributed_optimizer=True,
    )
    assert isinstance(config.min_lr, float)


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_command_line_and_the_api_agree(example):
    ours, theirs = load_optimizer_config(example), from_flags("--optimizer-config", str(example))
    runs = {"params_dtype", "timers", "min_lr", "optimizer_offload_fraction", "fp8_recipe"}
    for item in dataclasses.fields(ours):
        if item.name not in {*runs, "barrier_with_L1_time"}:
            assert getattr(ours, item.name) == getattr(theirs, item.name), item.name
    assert theirs.min_lr == (ours.min_lr or 0.0)


def test_a_file_is_the_same_as_its_flags(written):
    path = written("optimizer: muon\nlr: 0.3\nmuon-momentum: 0.8\nmuon-split-qkv: false\n")
    flags = "--optimizer muon --lr 0.3 --muon-momentum 0.8 --muon-no-split-qkv".split()
    assert from_flags("--optimizer-config", path) == from_flags(*flags)
    # giving both is allowed as long as they agree
    assert from_flags("--optimizer-config", path, *flags) == from_flags(*flags)


def test_whose_defaults(written):
    config = load_optimizer_config(written("optimizer: muon\noptimizer-defaults: megatron\n"))
    assert (config.muon_tp_mode, config.muon_split_gated) == (MegatronConfig().muon_tp_mode, False)
    config = load_optimizer_config(written("optimizer: muon\noptimizer-defaults: recommended\n"))
    assert (config.muon_tp_mode, config.muon_split_gated) == ("auto", True)


@pytest.mark.parametrize(
    ("flags", "line", "named"),
    [
        ("--lr 0.2", "lr: 0.1", "--lr=0.2: .*optimizer.yaml says 0.1"),
        # equal to the flag's default, but given
        ("--muon-momentum 0.95", "muon-momentum: 0.9", "--muon-momentum=0.95: .*says 0.9"),
        ("--no-muon-split-mla", "muon-split-mla: true", "--muon-split-mla=False: .*says True"),
        ("--optimizer adam", "muon-momentum: 0.9", "--optimizer='adam': .*says 'muon'"),
        ("--optimizer-defaults megatron", "optimizer-defaults: recommended", "says 'recommended'"),
        ("--use-distributed-optimizer", "use-distributed-optimizer: false", "says False"),
        ("--yaml-cfg other.yaml", "lr: 0.1", "--yaml-cfg, which replaces all flags"),
    ],
)
def test_a_flag_that_says_something_else_is_an_error(written, flags, line, named):
    with pytest.raises(ConfigurationError, match=named):
        parse("--optimizer-config", written(f"optimizer: muon\n{line}\n"), *flags.split())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("muon-momentumm: 0.9", "optimizer.yaml: muon-momentumm=0.9: .*mean muon-momentum"),
        ("qqqqqq: 1", "not an optimizer setting. Use the name of"),
        ("bf16: true", "bf16=True: belongs to the run.*--bf16"),
        ("lr: 0.1\nlr: 0.1", "duplicate key lr"),
        ("weight-decay: 0.1\nweight_decay: 0.2", "weight-decay=0.2: the file also has 0.1"),
        ("lr: fast", "lr='fast'.*must be a number"),
        ("lr: ${nowhere}", "'nowhere' not found"),
        ("weight-decay: null", "weight-decay=None.*must be a number.*leave it out"),
        ("muon-num-ns-steps: 5.5", "muon-num-ns-steps=5.5.*must be an integer"),
        ("muon-tp-mode: exchnge", "muon-tp-mode='exchnge': must be one of blockwise"),
        ("exp-avg-dtype: float32", "must be one of fp32, fp16, bf16, fp8"),
        ("lr: !!python/object:os.system x", "cannot be read"),
        # bounds, choices and combinations, checked without a model
        ("lr: .nan", "lr=nan: must be"),
        ("muon-momentum: 1.5", "muon_momentum=1.5: must be a finite number"),
        ("muon-scalar-optimizer: adan", "muon_scalar_optimizer='adan'.*'adam'"),
        # whole files
        (b"", "does not say which optimizer"),
        (b"- optimizer: muon\n", "must be a mapping"),
        (b"muon\n", "muon=None: is not an optimizer setting"),
        (b"optimizer: muonn\n", "optimizer='muonn'.*Did you mean 'muon'"),
        (b"optimizer: muon # \xe9\n", "cannot be read"),
    ],
)
def test_files_that_raise_an_error(written, text, named):
    path = written(f"optimizer: muon\n{text}\n" if isinstance(text, str) else text)
    with pytest.raises(ConfigurationError, match=named):
        load_optimizer_config(path)
    with pytest.raises(ConfigurationError, match=named):
        parse("--optimizer-config", path)


def test_data_types_have_the_flags_names(written):
    # The trainer turns the names into data types itself.
    path = written("optimizer: adam\nmain-grads-dtype: fp32\nexp-avg-sq-dtype: fp32\n")
    assert load_optimizer_config(path).exp_avg_sq_dtype is torch.float32
    assert parse("--optimizer-config", path).exp_avg_sq_dtype == "fp32"


def test_every_key_is_a_field_and_nearly_every_one_a_flag():
    names = set(ALLOWED) - {DEFAULTS_KEY}
    assert names <= {item.name for item in dataclasses.fields(EmergingOptimizerConfig)}
    assert names - set(vars(parse())) == {
        "decoupled_weight_decay",
        "grad_norm_skip_threshold",
        "store_param_remainders",
    }
