"""What is needed of megatron-core and emerging-optimizers is looked for, and named if missing."""

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

import pytest

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.base import upstream
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.settings.settings import resolve

EITHER = {"wrap_model_chunks_with_ddp", "_ddp_wrap"}
"""One of them wires layer-wise storage, which one depends on the release."""


@pytest.mark.parametrize("name", sorted(upstream.NEEDS.keys() - EITHER))
def test_all_that_is_needed_is_there(name):
    upstream.needed(name)


def test_something_wires_layer_wise_storage():
    assert any(map(upstream.found, EITHER))


class Whole:
    def __init__(self, first, second=2): ...

    def method(self):
        return self.given


class Lacking:
    def __init__(self, first, third=2): ...


@pytest.fixture
def stand_in(monkeypatch) -> ModuleType:
    module = ModuleType("megatron.stand_in")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    need = upstream.Need(
        "a test", takes="second", has="method", reads="given", sets="given", module=module.__name__
    )
    monkeypatch.setitem(upstream.NEEDS, "Thing", need)
    return module


def test_a_thing_that_is_as_needed_is_returned(stand_in):
    stand_in.Thing = Whole
    assert upstream.needed("Thing") is upstream.found("Thing") is Whole
    assert upstream.default_of("Thing", "second") == 2
    with pytest.raises(upstream.UpstreamError, match="has no given of Thing, which"):
        upstream.check_instance("Thing", Whole(1))


@pytest.mark.parametrize(
    ("thing", "what"),
    [
        (None, r"megatron\.stand_in\.Thing"),
        (type("Thing", (Lacking,), {}), "method of Thing"),
        (type("Thing", (Lacking,), {"method": None}), "second among the parameters of Thing"),
        (type("Thing", (Whole,), {}), "use for given in Thing"),
    ],
    ids=["name", "attribute", "parameter", "use"],
)
def test_what_is_missing_is_named_with_what_to_do(stand_in, thing, what):
    if thing is not None:
        stand_in.Thing = thing
    message = rf"^megatron-core \S+ has no {what}, which megatron-eopt needs for a test; install "
    with pytest.raises(ImportError, match=message):
        upstream.needed("Thing")
    assert upstream.found("Thing") is None


def test_a_module_that_is_gone_is_a_missing_name(monkeypatch):
    need = upstream.Need("a test", module="emerging_optimizers.gone")
    monkeypatch.setitem(upstream.NEEDS, "Thing", need)
    with pytest.raises(upstream.UpstreamError, match=r"emerging-optimizers \S+ has no emerging_"):
        upstream.needed("Thing")


@pytest.fixture
def other_release(monkeypatch) -> str:
    monkeypatch.setattr(upstream, "_warned", set())
    monkeypatch.setattr(importlib.import_module("megatron.core"), "__version__", "0.20.0rc1+abc")
    monkeypatch.setattr(importlib.import_module("emerging_optimizers"), "__version__", "0.3.0")
    return "megatron-core 0.20.0rc1"


def adam(**fields: Any) -> EmergingOptimizerConfig:
    return EmergingOptimizerConfig(optimizer="adam", lr=0.1, **fields)


def test_a_release_that_nobody_tested_is_warned_of_once(other_release, caplog):
    with caplog.at_level(logging.WARNING, upstream.__name__):
        resolve(adam())
        resolve(adam())
    (record,) = caplog.records
    assert f"not with {other_release};" in record.getMessage()


def test_strict_upstream_refuses_it(other_release):
    with pytest.raises(ConfigurationError, match=rf"strict_upstream=True: {other_release} is not"):
        resolve(adam(strict_upstream=True))


def test_the_tested_releases_pass(monkeypatch, caplog):
    for package, module in upstream._MODULES.items():
        version = upstream.TESTED[package]
        monkeypatch.setattr(importlib.import_module(module), "__version__", version)
    resolve(adam(strict_upstream=True))
    assert not caplog.records
