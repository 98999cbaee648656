"""A setting's old name sets it in every place that takes settings, with one line in the log."""

import argparse
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.core.optimizer import OptimizerConfig
from megatron.training.config.instantiate_utils import InstantiationException, instantiate

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, load_optimizer_config
from megatron_eopt.arguments import config_from_args
from megatron_eopt.base import renamed
from megatron_eopt.base.renamed import SETTINGS
from megatron_eopt.bridge import BridgeOptimizerConfig
from megatron_eopt.config.settings import resolve
from megatron_eopt.config.values import read_config
from tests.unit.arguments.test_arguments import parsed, parser

VALUES: dict[str, list[Any]] = {
    "matrix_buffer_mb": [8.0, 16.0],
    "muon_max_ranks_per_matrix": [2, 4],
    "muon_overlap_dp_comm": [True, False],
    "muon_ignore_use_muon": [True, False],
    "ckpt_allow_missing_optim_state": [("exp_avg",), ("L", "R")],
    "muon_skip_grad_clip": [True, False],
}
"""Two values of each setting."""


@dataclasses.dataclass
class Mine(EmergingOptimizerConfig):
    """A user's configuration."""

    mine_decay: float = 0.5


def constructed(cls: type, given: dict[str, Any]) -> Any:
    return cls(optimizer="muon", lr=0.1, **given)


def replaced(given: dict[str, Any]) -> Any:
    others = {name: values[1] for name, values in VALUES.items()}
    return dataclasses.replace(constructed(Mine, others), lr=0.2, **given)


def assigned(cls: type, given: dict[str, Any]) -> Any:
    config = constructed(cls, {})
    for name, value in given.items():
        setattr(config, name, value)
    return config


def unpickled(given: dict[str, Any]) -> Any:
    config = constructed(EmergingOptimizerConfig, {})
    for name in given:  # an earlier release knew the old name only
        vars(config).pop(SETTINGS.get(name), None)
    vars(config).update(given)
    return pickle.loads(pickle.dumps(config))


def argv(given: dict[str, Any]) -> list[str]:
    words = []
    for name, value in given.items():
        off = "no-" if value is False else ""
        many = [] if isinstance(value, bool) else value if isinstance(value, tuple) else [value]
        words += [f"--{off}{name.replace('_', '-')}", *map(str, many)]
    return words


def of_flags(given: dict[str, Any]) -> Any:
    return config_from_args(parsed("--optimizer", "muon", "--lr", "0.1", *argv(given)))[0]


def of_args(given: dict[str, Any]) -> Any:
    return config_from_args(argparse.Namespace(optimizer="muon", lr=0.1, **given))[0]


def of_file(given: dict[str, Any], folder: Path) -> Any:
    path = folder / "optimizer.yaml"
    fields = {"optimizer": "muon", "lr": 0.1, "use_distributed_optimizer": True}
    path.write_text(yaml.safe_dump(fields | given, sort_keys=False))
    return load_optimizer_config(path)


def of_run_config(given: dict[str, Any]) -> Any:
    target = "megatron_eopt.bridge.BridgeOptimizerConfig"
    written = {n: [*v] if isinstance(v, tuple) else v for n, v in given.items()}
    return instantiate({"_target_": target, "optimizer": "muon", **written})


def of_recipe(given: dict[str, Any]) -> Any:
    return BridgeOptimizerConfig.from_recipe(assigned(OptimizerConfig, given))


def over_recipe(given: dict[str, Any]) -> Any:
    return BridgeOptimizerConfig.from_recipe(constructed(EmergingOptimizerConfig, {}), **given)


WAYS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "constructor": lambda given: constructed(EmergingOptimizerConfig, given),
    "constructor of a subclass": lambda given: constructed(Mine, given),
    "constructor of the Bridge's": lambda given: constructed(BridgeOptimizerConfig, given),
    "replace": replaced,
    "attributes of megatron-core's class": lambda given: assigned(OptimizerConfig, given),
    "pickle": unpickled,
    "flags": of_flags,
    "parsed flags": of_args,
    "the Bridge's run_config.yaml": of_run_config,
    "a recipe": of_recipe,
    "a change of a recipe": over_recipe,
}


@pytest.fixture
def way(request: Any, tmp_path: Path) -> Callable[[dict[str, Any]], Any]:
    if request.param == "file":
        return lambda given: of_file(given, tmp_path)
    return WAYS[request.param]


def pairs(*more: str) -> list[tuple[str, str]]:
    found = [(way, old) for way in (*WAYS, *more) for old in SETTINGS]
    # the run, not its optimizer file, says what a checkpoint may lack
    return [pair for pair in found if pair != ("file", "checkpoint_fresh_state")]


EVERY_WAY = pytest.mark.parametrize(("way", "old"), pairs("file"), indirect=["way"])


@EVERY_WAY
def test_an_old_name_sets_what_the_new_one_sets(way, old, caplog):
    renamed._tell.cache_clear()
    new, (value, _) = SETTINGS[old], VALUES[SETTINGS[old]]
    told = f"{old} is called {new} now (--{new.replace('_', '-')})"
    config = way({new: value})
    assert told not in caplog.text
    expected = read_config(config)
    for _ in range(2):
        assert read_config(way({old: value})) == expected
    assert getattr(expected, new) == value
    assert caplog.text.count(told) == 1


@EVERY_WAY
def test_two_names_with_two_values_are_an_error(way, old):
    new, (value, other) = SETTINGS[old], VALUES[SETTINGS[old]]
    for given in ({old: value, new: other}, {new: other, old: value}):
        with pytest.raises((ConfigurationError, InstantiationException)) as caught:
            read_config(way(given))
        error = str(caught.value).replace("-", "_").replace("[", "(").replace("]", ")")
        for text in (old, new, repr(value)[:-2], repr(other)[:-2]):
            assert text in error
    assert getattr(read_config(way({old: value, new: value})), new) == value


@pytest.mark.parametrize("old", SETTINGS)
@pytest.mark.parametrize("cls", [EmergingOptimizerConfig, BridgeOptimizerConfig, Mine])
def test_an_old_attribute_is_the_new_one(cls, old):
    new, (value, other) = SETTINGS[old], VALUES[SETTINGS[old]]
    config = constructed(cls, {new: value})
    assert getattr(config, old) == value
    setattr(config, old, other)
    assert getattr(config, new) == getattr(config, old) == other
    assert old not in vars(config) | dataclasses.asdict(config)


def test_old_names_are_in_no_help():
    hidden = {action.dest: action.help == argparse.SUPPRESS for action in parser()._actions}
    assert all(hidden[old] and not hidden[new] for old, new in SETTINGS.items())


def test_readers_of_constructors_know_all_names():
    names = [*inspect.signature(Mine).parameters]
    assert names == [*(item.name for item in dataclasses.fields(Mine)), *SETTINGS]


def test_a_plain_configuration_acts_like_megatron_core():
    config = OptimizerConfig(optimizer="muon", lr=0.1)
    before = dict(vars(config))
    found = resolve(config).config
    assert (found.muon_backend, found.fused_adam) == ("emerging_optimizers", False)
    assert isinstance(found, OptimizerConfig)
    assert vars(config) == before
