"""Optimizers as emerging-optimizers 0.4 and megatron-core 0.20 have them: stand-ins of each."""

import inspect
from dataclasses import dataclass

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer import emerging_optimizers as stock

from megatron_eopt import (
    TensorParallelAdaptiveMuon,  # noqa: F401  by its name
    TensorParallelMuon,
)
from megatron_eopt.arguments import flags
from megatron_eopt.math.orthogonalize import DEFAULT_EPS
from megatron_eopt.optimizers.modes import plan_work
from megatron_eopt.settings import config as config_module
from megatron_eopt.settings.arguments import muon_family_kwargs
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
