"""A value means the same from Python, from a file and from flags, or is the same error."""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from megatron.core.optimizer import OptimizerConfig
from torch import nn

from megatron_eopt import ConfigurationError, ConfigurationTypeError, EmergingOptimizerConfig
from megatron_eopt.arguments import config_from_args
from megatron_eopt.config import checks, values
from megatron_eopt.config.fields import field_types
from megatron_eopt.config.settings import resolve
from megatron_eopt.config.values import DTYPES, read_config
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.math.coefficients import CoefficientsLike
from megatron_eopt.wrappers.config_file import ALLOWED, load_optimizer_config, read_optimizer_file
from tests.unit.arguments.test_arguments import parse
from tests.unit.fsdp2.models import groups_of

FIELDS = field_types(EmergingOptimizerConfig)
TEXTS = ("false", "yes", "0.5", "3", "muon", "fp32")
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 3, 2.0, 2.5, float("inf"), *TEXTS),
    *([], ["a", "b"], ["a", 1], {"a": 1}),
]
"""What YAML can write, too."""

OF_LIBRARIES = {bool: np.bool_(True), int: np.int64(3), float: np.float32(0.5)}

MEANINGS: dict[Any, list[tuple[Any, Any]]] = {
    bool: [(True, True), (False, False), (0, False), (1, True)],
    int: [(0, 0), (1, 1), (3, 3), (2.0, 2)],
    float: [*((n, n) for n in (0, 1, 3, 2.0, 2.5)), (float("inf"), float("inf"))],
    str: [(text, text) for text in TEXTS],
    torch.dtype: [("fp32", torch.float32)],
    CoefficientsLike: [(text, text) for text in TEXTS],
    tuple[str, ...]: [*((text, (text,)) for text in TEXTS), ([], ()), (["a", "b"], ("a", "b"))],
}
"""What some values of VALUES mean by the type of a field; all others are errors."""


def outcome(get: Any) -> Any:
    """Return what a function returns, or the end of its error, which names rule and hint."""
    try:
        return get()
    except ConfigurationError as error:
        return type(error), str(error).partition("=")[2]


def expected(name: str, value: Any) -> Any:
    """Return what a value means for a field; ConfigurationError if nothing."""
    kind = FIELDS[name]
    if value is None:
        return None if kind.optional else ConfigurationError
    meanings = MEANINGS.get(kind.type, [])
    found = [m for v, m in meanings if type(v) is type(value) and v == value]
    if not found or (kind.choices and found[0] not in kind.choices):
        return ConfigurationError
    return found[0]


def from_python(cls: type, name: str, value: Any) -> Any:
    config = cls()
    setattr(config, name, value)
    return getattr(read_config(config), name)


@pytest.fixture(scope="module")
def args() -> argparse.Namespace:
    return parse("--optimizer", "muon")


def cases() -> Iterator[tuple[str, Any]]:
    for name, kind in FIELDS.items():
        if name != "timers":  # a function, of which nothing is read
            of_libraries = [OF_LIBRARIES[kind.type]] if kind.type in OF_LIBRARIES else []
            yield from ((name, value) for value in [*VALUES, *of_libraries])


def test_every_field_is_read_by_its_type(args: argparse.Namespace, tmp_path: Path) -> None:
    path, wrong = tmp_path / "optimizer.yaml", []
    megatrons = field_types(OptimizerConfig)
    for name, value in cases():
        python = outcome(lambda n=name, v=value: from_python(EmergingOptimizerConfig, n, v))
        if isinstance(value, np.generic):
            if python != value.item() or isinstance(python, np.generic):
                wrong.append((name, value, python))
            continue
        meant = expected(name, value)
        is_error = isinstance(python, tuple) and any(isinstance(item, type) for item in python)
        if is_error != (meant is ConfigurationError) or not (is_error or python == meant):
            wrong.append((name, value, python))
        ways = {}
        if megatrons.get(name) == FIELDS[name]:
            ways["megatron"] = outcome(lambda n=name, v=value: from_python(OptimizerConfig, n, v))
        if name in ALLOWED and name != "optimizer":
            path.write_text(yaml.safe_dump({"optimizer": "muon", name: value}))
            found = outcome(lambda n=name: read_optimizer_file(path).values[n])
            is_dtype = FIELDS[name].type is torch.dtype
            ways["file"] = DTYPES.get(found, python) if is_dtype and found is not None else found
        if hasattr(args, name) and name not in ("fp8_recipe", "use_precision_aware_optimizer"):
            given = argparse.Namespace(**{**vars(args), name: value})
            if FIELDS[name].type is not torch.dtype:
                ways["flags"] = outcome(lambda a=given, n=name: getattr(config_from_args(a)[0], n))
        wrong += [(name, value, python, way, o) for way, o in ways.items() if o != python]
    assert not wrong


@pytest.mark.parametrize("name", ["clip_grad", "adam_eps", "weight_decay", "muon_momentum"])
@pytest.mark.parametrize("cls", [OptimizerConfig, EmergingOptimizerConfig])
def test_a_missing_value_names_field_and_hint(cls: type, name: str) -> None:
    config = cls(optimizer="muon", lr=0.1)
    setattr(config, name, None)
    with pytest.raises(ConfigurationTypeError, match=rf"^{name}=None .*number.*or leave it out"):
        resolve(config)


ONE, TWO = (3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)
COEFFICIENTS = {
    # in Python and in a file, as a flag, and what it means
    "a name": ("aol", "aol", "aol"),
    "a triple": (ONE, "3.4445,-4.775,2.0315", (ONE,)),
    "a list": ([*ONE], "3.4445,-4.775,2.0315", (ONE,)),
    "triples": ([ONE, [*TWO]], "3.4445,-4.7750,2.0315,2,-1.5,0.5", (ONE, TWO)),
    "whole numbers": ((3, -3, 1), "3,-3,1", ((3.0, -3.0, 1.0),)),
}


@pytest.mark.parametrize("case", COEFFICIENTS)
def test_coefficients_mean_the_same_from_everywhere(case: str, tmp_path: Path) -> None:
    value, flag, meaning = COEFFICIENTS[case]
    name, path = "muon_coefficient_type", tmp_path / "optimizer.yaml"
    for cls in (OptimizerConfig, EmergingOptimizerConfig):
        assert from_python(cls, name, value) == meaning
        settings = resolve(cls(optimizer="muon", lr=0.1, **{name: value}))
        assert getattr(settings.config, name) == meaning
    written = value if isinstance(value, str) else np.asarray(value).tolist()
    path.write_text(yaml.safe_dump({"optimizer": "muon", name: written}))
    assert getattr(load_optimizer_config(path), name) == meaning
    flags = ("--optimizer", "muon", "--muon-coefficient-type", flag)
    both = (*flags, "--optimizer-config", str(path))
    for given in (flags, both):
        assert getattr(config_from_args(parse(*given))[0], name) == meaning


@pytest.mark.parametrize("flag", ["quintik", "1,2", "1,2,x", ""])
def test_a_flag_says_which_coefficients_there_are(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--optimizer", "muon", f"--muon-coefficient-type={flag}")
    error = capsys.readouterr().err
    assert f"invalid choice: {flag!r} (choose from simple, quintic, " in error
    assert "or give numbers a,b,c" in error


def test_coefficients_that_diverge_are_refused_from_everywhere(tmp_path: Path) -> None:
    name, value, path = "muon_coefficient_type", (30.0, 20.0, 10.0), tmp_path / "optimizer.yaml"
    path.write_text(f"optimizer: muon\n{name}: [30, 20, 10]\n")
    flags = ("--optimizer", "muon", "--muon-coefficient-type", "30,20,10")
    for read in (
        lambda: EmergingOptimizerConfig(optimizer="muon", lr=0.1, muon_coefficient_type=value),
        lambda: load_optimizer_config(path),
        lambda: config_from_args(parse(*flags))[0],
    ):
        with pytest.raises(ConfigurationError, match=f"{name}=.*it diverges"):
            resolve(read())


def test_steps_read_the_present_values_of_the_callers_configuration() -> None:
    config = EmergingOptimizerConfig(optimizer="muon", lr=np.float32(0.5))
    settings = resolve(config)
    assert type(settings.config.lr) is float
    config.clip_grad = 0.25
    assert settings.original.clip_grad == 0.25


def test_an_output_layer_may_be_one_string() -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "lm_head": nn.Linear(4, 8)})
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.1)
    optimizer = build_optimizer(model, config, output_layers="lm_head")
    found = groups_of(optimizer)
    assert found["body.weight"]["optimizer"] == "muon"
    assert found["lm_head.weight"]["optimizer"] == "adam"
    with pytest.raises(ConfigurationTypeError, match=r"output_layers=.*sequence of.*strings"):
        build_optimizer(model, config, output_layers=[1])


def test_a_plain_configuration_acts_like_megatron_core() -> None:
    config = OptimizerConfig(optimizer="muon", lr=0.1)
    before = dict(vars(config))
    found = resolve(config).config
    assert (found.muon_backend, found.fused_adam) == ("emerging_optimizers", False)
    assert isinstance(found, OptimizerConfig)
    assert vars(config) == before


def test_a_build_reads_each_value_at_most_twice(monkeypatch):
    counts: Counter[str] = Counter()

    def counting(argument, value, kind, read=values.read_value):
        counts[argument] += 1
        return read(argument, value, kind)

    for module in (values, checks):
        monkeypatch.setattr(module, "read_value", counting)
    for optimizer in ("muon", "soap", "lion"):
        counts.clear()
        config = EmergingOptimizerConfig(optimizer=optimizer, lr=0.1)
        build_optimizer(nn.Linear(4, 4, bias=False), config)
        assert max(counts.values()) <= 2, (optimizer, counts.most_common(3))
