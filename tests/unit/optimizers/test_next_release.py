"""Optimizers as emerging-optimizers 0.4 and megatron-core 0.20 have them: stand-ins of each."""

import inspect
import logging
import sys
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
from megatron_eopt.math.orthogonalize import DEFAULT_EPS
from megatron_eopt.optimizers.modes import plan_work
from megatron_eopt.settings import config as config_module
from megatron_eopt.settings import registry
from megatron_eopt.settings.arguments import emerging_kwargs, muon_family_kwargs, offered_names
from tests.unit.optimizers.test_modes import rows


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.eye(4, 6))


@pytest.mark.parametrize("name", ["TensorParallelMuon", "TensorParallelAdaptiveMuon"])
@pytest.mark.tested_release
def test_arguments_have_the_order_of_megatron_core(name):
    theirs = list(inspect.signature(getattr(stock, name)).parameters)
    ours = list(inspect.signature(globals()[name]).parameters)
    assert ours[: len(theirs)] == theirs


# fields and defaults


def test_a_flag_whose_field_is_gone_is_not_offered(monkeypatch):
    assert flags.has_meaning("soap-shampoo-beta")
    monkeypatch.delitem(flags._FIELDS, "soap_shampoo_beta")
    assert not flags.has_meaning("soap-shampoo-beta")


def test_defaults_of_megatron_are_read_from_it(monkeypatch):
    @dataclass
    class Next(OptimizerConfig):
        muon_tp_mode: str = "duplicated"

    monkeypatch.setattr(config_module, "OptimizerConfig", Next)
    assert config_module.default_values("megatron")["muon_tp_mode"] == "duplicated"
    assert config_module.default_values("recommended")["muon_tp_mode"] == "auto"


def test_the_smallest_norm_is_upstreams():
    assert inspect.signature(muon_utils.newton_schulz).parameters["eps"].default == DEFAULT_EPS


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
