"""Settings that are gone: refused with advice, and left out at their old defaults.

Commit d8bb4515 wrote tests/data/before_retired from ``WRITTEN``: a pickled EmergingOptimizerConfig,
and the ``optimizer`` section of a run_config.yaml, by megatron.training's container.
"""

import argparse
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from megatron.core.optimizer import OptimizerConfig
from megatron.training.config import instantiate_utils
from megatron.training.config.instantiate_utils import InstantiationMode, instantiate

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, load_optimizer_config
from megatron_eopt.arguments import add_arguments, config_from_args
from megatron_eopt.bridge import BridgeOptimizerConfig
from megatron_eopt.config.retired import RETIRED
from megatron_eopt.config.settings import resolve
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp
from tests.unit.arguments.test_arguments import parse, parser

DATA = Path(__file__).parents[2] / "data/before_retired"
WRITTEN: dict[str, Any] = {
    "optimizer": "muon",
    "use_distributed_optimizer": True,
    "lr": 0.01,
    "min_lr": 0.001,
    "bf16": True,
    "params_dtype": torch.bfloat16,
    "muon_tp_mode": "exchange",
    # defaults of that version
    "muon_scale_mode": "spectral",
    "muon_nesterov": False,
    "muon_coefficient_type": ((3.0, -4.0, 2.0), (2.0, -1.5, 0.5)),
}
OTHERS = {bool: True, int: 3, float: 0.5, tuple: ["momentum_buffer"]}
"""Values that are no defaults."""


def run_config(**changes: Any) -> dict[str, Any]:
    """Return what a run of the Bridge has written, with other values."""
    return yaml.safe_load((DATA / "run_config.yaml").read_text())["optimizer"] | changes


def plain(config: OptimizerConfig) -> Any:
    return resolve(config).config


@pytest.mark.parametrize("mode", InstantiationMode)
def test_the_bridges_file_of_an_earlier_version(mode, caplog):
    config = instantiate(run_config(), mode=mode)
    config.finalize()
    expected = BridgeOptimizerConfig(**WRITTEN)
    expected.finalize()
    assert plain(config) == plain(expected)
    assert not caplog.records


@on_ranks(1)
def test_an_optimizer_is_built_from_it():
    initialize_megatron()
    config = instantiate(run_config())
    chunk = wrap_ddp(tiny_gpt(layers=1, dtype=torch.bfloat16), use_distributed_optimizer=True)
    optimizer = config.provide(model_chunks=[chunk], config_overrides=None)
    assert optimizer.settings.optimizer == "muon"


def test_a_pickle_of_an_earlier_version():
    config = pickle.loads((DATA / "config.pickle").read_bytes())
    assert plain(config) == plain(EmergingOptimizerConfig(**WRITTEN))
    assert not RETIRED.keys() & vars(plain(config)).keys()


def listed(value: Any) -> Any:
    """Return a value as files have it."""
    return list(value) if isinstance(value, tuple) else value


def the_class(name: str, value: Any, _: Path) -> None:
    EmergingOptimizerConfig(**{name: value})


def an_attribute(name: str, value: Any, _: Path) -> None:
    config = OptimizerConfig(optimizer="muon", lr=0.1)
    setattr(config, name, value)
    resolve(config)


def a_pickle(name: str, value: Any, _: Path) -> None:
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.1)
    vars(config)[name] = value
    resolve(pickle.loads(pickle.dumps(config)))


def a_file(name: str, value: Any, folder: Path) -> None:
    path = folder / "optimizer.yaml"
    path.write_text(yaml.safe_dump({"optimizer": "muon", name.replace("_", "-"): listed(value)}))
    load_optimizer_config(path)


def arguments(name: str, value: Any, _: Path) -> None:
    config_from_args(argparse.Namespace(**vars(parse("--optimizer", "muon")) | {name: value}))


def the_bridge(name: str, value: Any, _: Path) -> None:
    instantiate(run_config(**{name: listed(value)}))


WAYS = (the_class, an_attribute, a_pickle, a_file, arguments, the_bridge)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RETIRED)
def test_an_old_default_is_left_out_and_another_value_refused(name, way, tmp_path):
    default, hint = RETIRED[name]
    way(name, default, tmp_path)
    errors = ConfigurationError, instantiate_utils.InstantiationException
    with pytest.raises(errors, match=re.escape(hint)):
        way(name, OTHERS[type(default)], tmp_path)


@pytest.mark.parametrize("name", RETIRED)
def test_a_flag_is_refused_and_not_shown(name):
    flag = f"--{name.replace('_', '-')}"
    for values in ([], ["0.0"]):
        with pytest.raises(ConfigurationError, match=f"{flag}=.*{re.escape(RETIRED[name].hint)}"):
            parser().parse_args([flag, *values])
    assert flag not in add_arguments(argparse.ArgumentParser()).format_help()
    assert not hasattr(parser().parse_args([]), name)
