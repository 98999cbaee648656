"""Every trainable parameter goes to exactly one optimizer, and to the right one."""

import copy

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, ParamKey

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, register_optimizer
from megatron_eopt.routing.overrides import describe, merge, unmatched
from megatron_eopt.routing.parameters import trainable_parameters
from megatron_eopt.settings import registry
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


def test_parameters_are_listed_once_and_frozen_ones_not_at_all():
    names = [item.name for item in trainable_parameters([Toy()])]
    assert "head.weight" not in names
    assert not [name for name in names if name.startswith("frozen")]
    assert len(names) == len(set(names)) == 8


def test_keys_that_match_nothing_are_found():
    parameters = trainable_parameters([Toy()])
    overrides = {ParamKey(name="fist.*"): {}, ParamKey(name="first.*"): {}}
    assert unmatched(parameters, overrides) == ["name=fist.*"]


def test_merging_does_not_depend_on_the_order_of_overrides():
    parameter = trainable_parameters([Toy()])[2]
    keys = [ParamKey(name="first.*"), ParamKey(name="*.weight"), ParamKey(attr="tied")]
    overrides = {key: {"wd_mult": 0.0} for key in keys}
    backwards = dict(reversed(overrides.items()))
    assert merge(parameter, overrides) == merge(parameter, backwards)
    assert merge(parameter, overrides).labels == ("name=*.weight", "name=first.*")
    assert describe(keys[2]) == "attr=tied"


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
            member.parameter.name: group.identity
            for group in groups_of(list(routes.values()))
            for member in group.members
        }

    assert identities(0.1, 0.2) == identities(0.5, 0.3)
    assert len(set(identities(0.1, 0.2).values())) == 6


def test_groups_of_other_ranks_exist_here_without_members():
    mine = list(routes_of(muon()).values())
    groups = groups_of([], mine)
    assert [group.identity for group in groups] == [g.identity for g in groups_of(mine, [])]
    assert not any(group.members for group in groups)


def test_tables_name_every_parameter():
    from megatron_eopt.routing.table import COLUMNS, format_table, routing_rows

    routes = routes_of(muon(), {ParamKey(name="*.bias"): {"wd_mult": 0.0}})
    rows = routing_rows(groups_of(list(routes.values())), {}, lr=0.1, weight_decay=0.01)
    assert [row[0] for row in rows] == list(routes)
    assert ("first.bias", "4", "adam", "-", "0.1", "0", "1-D") in rows
    table = format_table(rows)
    assert len({len(line) for line in table.splitlines()}) == 1
    assert all(column in table.splitlines()[0] for column in COLUMNS)
