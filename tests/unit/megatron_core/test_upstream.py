"""What is needed of megatron-core and emerging-optimizers is looked for, and named if missing."""

import importlib
import logging
from collections.abc import Iterator

import pytest
from torch import nn

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.megatron_core import upstream
from megatron_eopt.wrappers import factory


@pytest.mark.parametrize("name", sorted(upstream.MODULE_OF))
def test_all_that_is_needed_is_there(name: str) -> None:
    assert upstream.require_upstream(name) is upstream.find_upstream(name)


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("megatron.core.optimizer", "megatron-core"),
        ("megatron.gone", "megatron-core"),
        ("emerging_optimizers", "emerging-optimizers"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setitem(upstream.MODULE_OF, "Thing", module)
    message = rf"^{package} \S+ has no {module}\.Thing, .* install {package} 0"
    with pytest.raises(ImportError, match=message):
        upstream.require_upstream("Thing")
    assert upstream.find_upstream("Thing") is None


@pytest.fixture
def other_release(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    upstream.warn_of_untested_releases.cache_clear()
    monkeypatch.setattr(importlib.import_module("megatron.core"), "__version__", "0.20.0rc1+abc")
    monkeypatch.setattr(importlib.import_module("emerging_optimizers"), "__version__", "0.3.0")
    yield
    upstream.warn_of_untested_releases.cache_clear()


@pytest.mark.usefixtures("other_release")
def test_a_release_that_nobody_tested_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, upstream.__name__):
        for _ in range(2):
            settings = EmergingOptimizerConfig(optimizer="adam", lr=0.1)
            factory._settings(settings, [nn.Linear(1, 1)], of_dtensors=False)
    (record,) = caplog.records
    assert record.getMessage().endswith(", not with megatron-core 0.20.0rc1")
