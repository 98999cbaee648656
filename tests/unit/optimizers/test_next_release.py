"""Optimizers as emerging-optimizers 0.4 and megatron-core 0.20 have them: stand-ins of each."""

import inspect
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import emerging_optimizers
import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon, muon_utils
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer import emerging_optimizers as stock

from megatron_eopt import (
    ConfigurationError,
    EmergingOptimizerConfig,
    TensorParallelAdaptiveMuon,  # noqa: F401  by its name
    TensorParallelMuon,
    register_optimizer,
)
from megatron_eopt.arguments import flags
from megatron_eopt.base import upstream
from megatron_eopt.math import coefficient_names, coefficients, resolve_coefficients
from megatron_eopt.math.orthogonalize import DEFAULT_EPS
from megatron_eopt.optimizers.modes import plan_work
from megatron_eopt.settings import registry
from megatron_eopt.settings.arguments import emerging_kwargs, muon_family_kwargs, offered_names
from tests.unit.optimizers.test_modes import rows


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.eye(4, 6))


# use_syrk


BEFORE = (1e-3, 0.95, True, 0.0, True, False, None, None, "medium", "quintic", 5, "spectral", 1.0)


def test_use_syrk_comes_after_tp_mode():
    with pytest.warns(UserWarning, match="use_syrk=True has no effect: .*triton|.*GPU"):
        plain = TensorParallelMuon([weight()], *BEFORE, None, "duplicated", True)
    assert plain.orthogonalization.backend == "torch"


@pytest.mark.parametrize("name", ["TensorParallelMuon", "TensorParallelAdaptiveMuon"])
@pytest.mark.tested_release
def test_arguments_have_the_order_of_megatron_core(name):
    theirs = list(inspect.signature(getattr(stock, name)).parameters)
    ours = list(inspect.signature(globals()[name]).parameters)
    assert ours[: len(theirs)] == theirs


def test_use_syrk_is_a_field_wherever_upstream_has_it():
    @dataclass
    class Next(OptimizerConfig):
        muon_use_syrk: bool = False

    config = Next(optimizer="muon", muon_use_syrk=True)
    kwargs = muon_family_kwargs(TensorParallelMuon, ("muon",), config, [None], None)
    assert kwargs["use_syrk"] is True
    assert EmergingOptimizerConfig().muon_use_syrk is False


# fields and defaults


def test_the_smallest_norm_is_upstreams(monkeypatch):
    assert upstream.default_of("newton_schulz", "eps") == DEFAULT_EPS

    def newton_schulz(
        x, steps, coefficient_type="", custom_coefficient_sets=None, eps=1e-15, transpose=None
    ): ...

    monkeypatch.setattr(muon_utils, "newton_schulz", newton_schulz)
    assert upstream.default_of("newton_schulz", "eps") == 1e-15


def test_megatrons_auto_shares_no_matrix_that_its_iteration_cannot():
    # one matrix outweighs everything: ours would be cut over the ranks
    big = [rows((8192, 2048), 8)]
    assert plan_work(big, 8, "auto", 1 << 26).matrices[0].mode == "distributed"
    assert plan_work(big, 8, "auto", 1 << 26, whole_only=True).matrices[0].mode == "duplicated"
    config = OptimizerConfig(optimizer="muon", lr=0.1, muon_tp_mode="auto")
    kwargs = muon_family_kwargs(TensorParallelMuon, ("muon",), config, [None], None)
    kwargs["qkv_split_shapes"] = None
    opt = TensorParallelMuon([weight()], **kwargs)
    assert opt.orthogonalization.backend == "emerging_optimizers"
    assert opt._means.whole_only


# what is registered


def test_packages_are_found_wherever_they_are(monkeypatch, tmp_path, caplog):
    for name, text in (
        ("legacy_stand_in", "loaded = True"),
        ("broken_stand_in", "import a_package_that_is_absent"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    path = [*emerging_optimizers.__path__, str(tmp_path)]
    monkeypatch.setattr(emerging_optimizers, "__path__", path)
    with caplog.at_level(logging.WARNING):
        upstream.register_all_optimizers()
    assert sys.modules.pop("emerging_optimizers.legacy_stand_in").loaded
    (record,) = caplog.records
    assert "broken_stand_in cannot be imported" in record.getMessage()


class NeedsRadius(Muon):
    """A Muon with an argument that no field gives."""

    def __init__(self, *args: Any, hyperball_radius: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept = hyperball_radius


@dataclass
class WithRadius(EmergingOptimizerConfig):
    on_a_ball_hyperball_radius: float = 2.0


def test_a_required_argument_needs_a_field(monkeypatch):
    monkeypatch.setattr(registry, "_entries", dict(registry.entries()))
    before = offered_names()
    register_optimizer("on_a_ball", NeedsRadius, prefixes=("on_a_ball", "muon"))
    assert offered_names() == before
    prefixes = ("on_a_ball", "muon")
    with pytest.raises(ConfigurationError, match=r"needs hyperball_radius, .*on_a_ball_hyperball"):
        emerging_kwargs(NeedsRadius, prefixes, EmergingOptimizerConfig())
    assert emerging_kwargs(NeedsRadius, prefixes, WithRadius())["hyperball_radius"] == 2.0


# coefficient sets

CUBIC = [(3.0, -3.2), (2.8, -2.5), (2.0, -1.0), (1.6, -0.6), (1.5, -0.5)]


@pytest.fixture(params=["refuses", "ignores"])
def cubic5(monkeypatch, request) -> None:
    """Give emerging-optimizers a set that has five steps, whatever is asked for."""
    original = muon_utils.newton_schulz

    def newton_schulz(x, steps, coefficient_type="quintic", **kwargs):
        if coefficient_type == "cubic5":
            if steps != 5 and request.param == "refuses":
                raise ValueError("cubic5 has 5 steps")
            triples = [(*pair, 0.0) for pair in CUBIC]
            return original(x, 5, "custom", custom_coefficient_sets=triples, **kwargs)
        return original(x, steps, coefficient_type, **kwargs)

    newton_schulz.__signature__ = inspect.signature(original)
    monkeypatch.setattr(muon_utils, "newton_schulz", newton_schulz)
    monkeypatch.setitem(muon_utils._COEFFICIENT_SETS, "cubic5", CUBIC)
    coefficients._resolve_named.cache_clear()
    yield
    coefficients._resolve_named.cache_clear()


@pytest.mark.usefixtures("cubic5")
def test_a_set_of_fixed_length_is_offered_and_takes_no_other():
    assert "cubic5" in coefficient_names()
    assert "cubic5" in flags.choices_of_trainer_flags()["muon_coefficient_type"]
    assert resolve_coefficients("cubic5", 5) == tuple((a, b, 0.0) for a, b in CUBIC)
    for steps in (4, 6):
        with pytest.raises(ConfigurationError, match=r"steps=\d: 'cubic5' has 5 steps in emerging"):
            resolve_coefficients("cubic5", steps)
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    wanted = muon_utils.newton_schulz(x, 5, "cubic5")
    for backend in ("torch", "emerging_optimizers"):
        with warnings.catch_warnings():
            opt = TensorParallelMuon(
                [weight()], coefficient_type="cubic5", fp32_matmul_prec="highest", backend=backend
            )
        found = opt.orthogonalization(x)
        # the same float32 products, in another order at most
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
