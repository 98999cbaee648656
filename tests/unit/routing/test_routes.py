"""Every trainable parameter goes to exactly one optimizer, and to the right one."""

import copy

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, ParamKey
from megatron.core.transformer.moe.router import Router

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, register_optimizer
from megatron_eopt.config import registry
from tests.unit.routing.toy import Toy, groups_of, routes_of


def muon(**fields):
    return EmergingOptimizerConfig(optimizer="muon", lr=0.1, **fields)


@pytest.mark.parametrize("cls", [OptimizerConfig, EmergingOptimizerConfig])
def test_matrices_go_to_muon_and_the_rest_to_the_scalar_optimizer(cls):
    routes = routes_of(cls(optimizer="muon", lr=0.1, muon_scalar_optimizer="lion"))
    by_optimizer = {name: route.optimizer for name, route in routes.items()}
    assert by_optimizer == {
        "words.weight": "lion",
        "positions.weight": "lion",
        "first.weight": "muon",
        "first.bias": "lion",
        "norm.weight": "lion",
        "norm.bias": "lion",
        "expert.weight": "muon",
        "chosen.weight": "lion",
    }
    assert routes["positions.weight"].why == "embedding or output layer"
    assert routes["chosen.weight"].why == "use_muon=False"
    assert routes["first.bias"].why == "1-D"
    assert routes["first.weight"].why == "matrix"


def test_adam_takes_everything():
    assert {r.optimizer for r in routes_of(OptimizerConfig(lr=0.1)).values()} == {"adam"}


class Gate(Router):
    """A router without its process group."""

    routing = forward = None

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.ones(3, 4))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (muon(), "muon"),
        (muon(muon_orthogonalize_router=False), "adam"),
        (OptimizerConfig(optimizer="muon", lr=0.1), "muon"),  # which has no such field
        (EmergingOptimizerConfig(optimizer="soap", lr=0.1), "soap"),
    ],
)
def test_a_router_goes_to_the_scalar_optimizer_only_if_a_setting_says_so(config, expected):
    routes = routes_of(config, model=torch.nn.ModuleDict({"toy": Toy(), "router": Gate()}))
    assert routes["router.weight"].optimizer == expected
    assert routes["toy.first.weight"].optimizer == config.optimizer


def test_an_override_routes_any_parameter_to_any_optimizer():
    overrides = {
        ParamKey(name="positions.*"): {"optimizer": "muon"},
        ParamKey(name="first.weight"): {"optimizer": "soap", "max_lr": 0.5},
        ParamKey(name="norm.*"): {"optimizer": "sgd"},
    }
    before = copy.deepcopy(overrides)
    routes = routes_of(muon(), overrides)
    assert routes["positions.weight"].optimizer == "muon"
    assert routes["first.weight"].optimizer == "soap"
    assert routes["first.weight"].values == {"max_lr": 0.5}
    assert routes["norm.bias"].optimizer == "sgd"
    assert routes["norm.bias"].why == "config_overrides: name=norm.*"
    assert overrides == before


def test_the_main_optimizer_has_its_own_learning_rate_unless_an_override_has_one():
    overrides = {ParamKey(name="expert.*"): {"max_lr": 0.7}}
    routes = routes_of(muon(muon_lr=0.3, muon_min_lr=0.01), overrides)
    assert routes["first.weight"].values == {"max_lr": 0.3, "min_lr": 0.01}
    assert routes["expert.weight"].values == {"max_lr": 0.7, "min_lr": 0.01}
    assert "max_lr" not in routes["first.bias"].values


@pytest.mark.parametrize(
    ("fields", "setting", "rates"),
    [
        ({"min_lr": 0.02}, {"lr_mult": 0.5}, {"max_lr": 0.05, "min_lr": 0.01}),
        ({"min_lr": 0.02}, {"lr_mult": 0.5, "max_lr": 0.3}, {"max_lr": 0.15, "min_lr": 0.01}),
        ({}, {"lr_mult": 0.5}, {"max_lr": 0.05}),
        ({"muon_lr": 0.4, "min_lr": 0.02}, {"lr_mult": 2.0}, {"max_lr": 0.8, "min_lr": 0.04}),
    ],
)
def test_a_multiplier_applies_to_the_highest_and_to_the_lowest_rate(fields, setting, rates):
    routes = routes_of(muon(**fields), {ParamKey(name="first.weight"): setting})
    assert routes["first.weight"].values == pytest.approx(rates)


def test_a_third_party_optimizer_may_take_everything(monkeypatch):
    registry.entries()
    monkeypatch.setattr(registry, "_entries", dict(registry.entries()))

    @register_optimizer("everything", state_layout="element_wise", default_param_overrides={})
    class Everything(torch.optim.SGD):
        pass

    routes = routes_of(OptimizerConfig(optimizer="everything", lr=0.1))
    assert {route.optimizer for route in routes.values()} == {"everything"}
    with pytest.raises(ConfigurationError, match="already"):
        register_optimizer("everything", Everything)
    with pytest.raises(ConfigurationError, match="already"):
        register_optimizer("adam", Everything)


def test_identities_do_not_depend_on_numbers():
    def identities(lr, other):
        overrides = {
            ParamKey(name="first.weight"): {"max_lr": lr},
            ParamKey(name="expert.*"): {"max_lr": other},
            ParamKey(name="words.*"): {"max_lr": other, "wd_mult": 0.0},
            ParamKey(name="norm.weight"): {"max_lr": lr},
            ParamKey(name="norm.bias"): {"max_lr": other},
        }
        routes = routes_of(muon(), overrides)
        return {
            route.parameter.name: group.identity
            for group in groups_of(list(routes.values()))
            for route in group.routes
        }

    assert identities(0.1, 0.2) == identities(0.5, 0.3)
    assert len(set(identities(0.1, 0.2).values())) == 6
