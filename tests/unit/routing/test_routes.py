"""Every trainable parameter goes to exactly one optimizer, and to the right one."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, ParamKey, ParamPredicate
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.transformer.moe.router import Router

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, register_optimizer
from megatron_eopt.base.errors import ConfigurationTypeError
from megatron_eopt.config import registry
from megatron_eopt.config.settings import resolve
from megatron_eopt.routing import routes as rules
from megatron_eopt.routing.groups import GROUP_ID, param_group
from megatron_eopt.routing.parameters import check_dtypes, cut_dimension, trainable_parameters
from megatron_eopt.routing.places import places_in
from megatron_eopt.routing.routes import describe, overrides_of, read_overrides, unmatched
from megatron_eopt.state.groups import find_groups
from megatron_eopt.wrappers import grouping as grouping_of
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
    assert routes_of(muon(muon_ignore_use_muon=True))["chosen.weight"].optimizer == "muon"


def test_adam_takes_everything():
    routes = routes_of(OptimizerConfig(lr=0.1)).values()
    assert {(route.optimizer, route.why) for route in routes} == {("adam", "every parameter")}


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
    assert routes["router.weight"].why == ("router" if expected == "adam" else "matrix")
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


def identities(config, overrides):
    """Return the identity of each parameter's group."""
    groups = groups_of([*routes_of(config, overrides).values()])
    return {route.parameter.name: group.identity for group in groups for route in group.routes}


def test_identities_do_not_depend_on_numbers():
    def with_rates(lr, other):
        overrides = {
            ParamKey(name="first.weight"): {"max_lr": lr},
            ParamKey(name="expert.*"): {"max_lr": other},
            ParamKey(name="words.*"): {"max_lr": other, "wd_mult": 0.0},
            ParamKey(name="norm.weight"): {"max_lr": lr},
            ParamKey(name="norm.bias"): {"max_lr": other},
        }
        return identities(muon(), overrides)

    assert with_rates(0.1, 0.2) == with_rates(0.5, 0.3)
    assert len(set(with_rates(0.1, 0.2).values())) == 6


FIRST = ParamKey(name="first.weight")


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (ParamKey(), "matches nothing"),
        (ParamKey(name="a", attr=("b", "c")), "attr=b, attr=c, name=a"),
        (ParamKey(predicate=ParamPredicate("large", bool)), "predicate=large"),
        (
            ParamKey(with_name_predicate=ParamWithNamePredicate("named", lambda *_: True)),
            "with_name_predicate=named",
        ),
    ],
)
def test_a_key_in_words(key, text):
    assert describe(key) == text


@pytest.mark.parametrize(
    ("given", "own_loop", "read"),
    [
        ({}, False, {}),
        ({"optimizer": "lion", "betas": (0.9, 0.5)}, False, None),
        ({"lr": 0.1}, False, {"lr": 0.1, "max_lr": 0.1}),
        ({"lr": 0.1, "max_lr": 0.1}, False, None),
        ({"weight_decay": 0.1}, True, {"weight_decay": 0.1, "start_wd": 0.1, "end_wd": 0.1}),
        ({"start_wd": 0.0, "end_wd": 0.1, "min_lr": 0.0}, False, None),
        ({"start_wd": 0.1, "end_wd": 0.1}, True, None),
        ({"wd_mult": np.float32(0.5)}, False, {"wd_mult": 0.5}),
        ({"own": -1.5}, False, None),
        ({"own": np.int64(3)}, False, {"own": 3}),
    ],
)
def test_what_is_read_from_an_override(given, own_loop, read):
    found = read_overrides({FIRST: given}, **({"own_loop": True} if own_loop else {}))
    assert found == {FIRST: given if read is None else read}
    assert not any(isinstance(value, np.generic) for value in found[FIRST].values())


@pytest.mark.parametrize(
    ("overrides", "own_loop", "kind", "text"),
    [
        ([], False, ConfigurationTypeError, "must map ParamKeys to settings"),
        ({"first": {}}, False, ConfigurationTypeError, "keys must be ParamKeys"),
        ({ParamKey(name=3): {}}, False, ConfigurationTypeError, "ParamKey(name)"),
        ({ParamKey(attr=(3,)): {}}, False, ConfigurationTypeError, "ParamKey(attr)"),
        ({FIRST: 3}, False, ConfigurationTypeError, "must map names of settings to values"),
        *(
            ({FIRST: {name: 1}}, False, ConfigurationError, "belongs to Megatron")
            for name in ("params", "is_expert_parallel", "is_decoupled_lr", "group_id")
        ),
        ({FIRST: {"optimizer": 3}}, False, ConfigurationTypeError, "must be"),
        ({FIRST: {"max_lr": -0.1}}, False, ConfigurationError, "at least 0"),
        ({FIRST: {"max_lr": "high"}}, False, ConfigurationTypeError, "must be"),
        ({FIRST: {"own": float("nan")}}, False, ConfigurationError, "must be a finite number"),
        ({FIRST: {"betas": [0.9, 0.5]}}, False, ConfigurationTypeError, "must be hashable"),
        ({FIRST: {"start_wd": 0.1}}, True, ConfigurationError, "['start_wd']=0.1"),
        ({FIRST: {"end_wd": 0.1}}, True, ConfigurationError, "['end_wd']=0.1"),
        ({FIRST: {"min_lr": 0.0}}, True, ConfigurationError, "your training loop has its own"),
        ({FIRST: {"lr": 0.1, "max_lr": 0.2}}, False, ConfigurationError, "contradicts max_lr=0.2"),
        (
            {FIRST: {"weight_decay": 0.1, "start_wd": 0.1, "end_wd": 0.2}},
            False,
            ConfigurationError,
            "contradicts end_wd=0.2",
        ),
    ],
)
def test_an_override_that_is_refused(overrides, own_loop, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        read_overrides(overrides, own_loop=own_loop)


def test_overrides_must_agree():
    parted = {FIRST: {"wd_mult": 0.5}, ParamKey(name="first.*"): {"wd_mult": 0.5, "max_lr": 0.3}}
    route = routes_of(muon(), parted)["first.weight"]
    assert route.values == {"wd_mult": 0.5, "max_lr": 0.3}
    assert route.labels == ("name=first.*", "name=first.weight")
    parted[ParamKey(name="*.weight")] = {"max_lr": 0.4}
    said = "first.weight matches 'name=first.*', which sets 0.3, and 'name=*.weight', which sets"
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        routes_of(muon(), parted)


def parameters_of(model):
    return trainable_parameters(places_in([model]))


def test_keys_that_match_nothing_here():
    keys = [
        ParamKey(name=("nothing", "first.*")),
        ParamKey(name="nothing"),
        ParamKey(name="module.first.*"),
        ParamKey(attr="allreduce"),
        ParamKey(attr="nothing"),
        ParamKey(predicate=ParamPredicate("all", lambda param: True)),
    ]
    found = unmatched(parameters_of(Toy()), {key: {} for key in keys})
    # `allreduce` is False; names may have what wrappers add
    assert found == ["name=nothing", "attr=allreduce", "attr=nothing"]


def test_weight_decay_that_was_asked_for_is_not_a_part_of_it():
    def values(wanted):
        (route,) = rules.route_all(
            [p for p in parameters_of(Toy()) if p.name == "first.bias"],
            {ParamKey(name="*"): wanted},
            resolve(muon()),
            {ParamKey(name="*.bias"): {"wd_mult": 0.0, "max_lr": 0.3}},
        )
        return route.values

    assert values({}) == {"wd_mult": 0.0, "max_lr": 0.3}
    assert values({"max_lr": 0.5}) == {"wd_mult": 0.0, "max_lr": 0.5}
    assert values({"start_wd": 0.1}) == {"start_wd": 0.1, "max_lr": 0.3}


def test_multipliers_need_a_rate():
    key = {FIRST: {"lr_mult": 0.5}}
    with pytest.raises(ConfigurationError, match="needs a learning rate to multiply"):
        routes_of(EmergingOptimizerConfig(optimizer="muon"), key)
    its = {FIRST: {"lr_mult": 0.5, "lr": 0.2, "max_lr": 0.2}}
    assert routes_of(muon(), its)["first.weight"].values == {"max_lr": 0.1, "lr": 0.1}
    plain = routes_of(muon(), {FIRST: {"lr_mult": 1.0}})
    assert plain["first.weight"].values == {}


def layers(**weights):
    return torch.nn.ParameterDict(weights)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((0, 4), "has no elements, so muon cannot update it"),
        ((4,), "updates only matrices, but a has the shape (4,)"),
        ((2, 4, 4), "updates only matrices, but a has the shape (2, 4, 4)"),
        ((4, 4), None),
    ],
)
def test_an_optimizer_of_matrices_gets_matrices_only(shape, text):
    model, key = layers(a=marked(shape)), ParamKey(name="a")
    assert routes_of(muon(), {key: {"optimizer": "lion"}}, model)["a"].optimizer == "lion"
    if text is None:
        assert routes_of(muon(), {key: {"optimizer": "muon"}}, model)["a"].optimizer == "muon"
        return
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        routes_of(muon(), {key: {"optimizer": "muon"}}, model)


def marked(shape, kind=torch.float32, **attributes):
    weight = torch.nn.Parameter(torch.ones(shape, dtype=kind))
    for name, value in attributes.items():
        setattr(weight, name, value)
    return weight


@pytest.mark.parametrize(
    ("weight", "facts", "how", "why"),
    [
        (marked((4, 4)), {}, {}, None),
        (marked((4, 4)), {"is_embedding": True}, {}, "embedding or output layer"),
        (marked((4, 4), torch.complex64), {}, {}, "complex numbers"),
        (marked((4,)), {}, {}, "1-D"),
        (marked((4,), eopt_split="whole"), {}, {}, "1-D"),
        (marked((2, 4, 4)), {}, {}, "3-D"),
        (marked((2, 4, 4)), {"is_stack": True}, {}, None),
        (marked((2, 2, 4, 4)), {"is_stack": True}, {}, "4-D"),
        (marked((2, 4, 4), eopt_matrix_stack=True), {}, {}, None),
        (marked((2, 4, 4), eopt_split="whole"), {}, {}, None),
        (marked((2, 2, 4, 4), eopt_split="whole"), {}, {}, None),
        (marked((4, 4)), {"why_vector": "bias"}, {}, "bias"),
        (marked((4, 4)), {"why_vector": "bias"}, {"by_module": False}, None),
        (marked((2, 4, 4)), {"why_vector": "bias"}, {}, "bias"),
        (marked((2, 4, 4)), {"why_vector": "bias"}, {"by_module": False}, "3-D"),
        (marked((4, 4), eopt_split="whole"), {"why_vector": "bias"}, {}, None),
        (marked((4, 4), use_muon=True), {"why_vector": "bias"}, {}, None),
        (marked((4, 4), use_muon=False), {"why_vector": "bias"}, {}, "bias"),
    ],
)
def test_what_is_no_matrix(weight, facts, how, why):
    (parameter,) = parameters_of(layers(a=weight))
    parameter.__dict__.update({"is_embedding": False, "why_vector": None} | facts)
    assert parameter.why_not_matrix(**how) == why


@pytest.mark.parametrize(
    ("options", "facts", "convolutions", "why"),
    [
        ({}, {}, False, "4-D"),
        ({}, {}, True, None),
        ({}, {"is_input": True}, True, "input layer"),
        ({"groups": 4}, {}, True, "depthwise convolution"),
        ({"groups": 2}, {}, True, None),
        ({"groups": 2, "in_channels": 2, "out_channels": 2}, {}, True, "depthwise convolution"),
        ({"in_channels": 1, "out_channels": 1}, {}, True, None),
    ],
)
def test_convolutions(options, facts, convolutions, why):
    sizes = {"in_channels": 4, "out_channels": 4, "kernel_size": 2, "bias": False}
    model = torch.nn.Sequential(torch.nn.Conv2d(**(sizes | options)))
    (parameter,) = parameters_of(model)
    parameter.__dict__.update(facts)
    assert parameter.is_convolution
    assert parameter.why_not_matrix(convolutions=convolutions) == why
    assert parameter.why_not_matrix() == "4-D"
    assert parameters_of(Toy())[0].is_convolution is False


@pytest.mark.parametrize(
    ("attributes", "dimension"),
    [
        ({}, -1),
        ({"partition_dim": 0}, 0),
        ({"partition_dim": 1}, 1),
        ({"partition_dim": 2}, -1),
        ({"partition_dim": -1, "tensor_model_parallel": True}, -1),
        ({"partition_dim": 1, "tensor_model_parallel": True}, 1),
        # Transformer Engine gives duplicated weights a dimension, too
        ({"partition_dim": 0, "tensor_model_parallel": False}, -1),
    ],
)
def test_the_dimension_that_tensor_parallelism_cuts(attributes, dimension):
    assert cut_dimension(marked((4, 4), **attributes)) == dimension


@pytest.mark.parametrize(
    ("kind", "double", "text"),
    [
        (torch.float32, False, None),
        (torch.bfloat16, False, None),
        (torch.float64, True, None),
        (torch.float64, False, "computes in float32"),
        (torch.complex64, False, "does not update complex numbers"),
        (torch.complex64, True, "does not update complex numbers"),
    ],
)
def test_number_types_that_a_step_would_round(kind, double, text):
    names = {torch.ones(2): "fine", torch.ones(2, dtype=kind): "its"}
    options = {"double": True} if double else {}
    if text is None:
        check_dtypes(names, "this", **options)
        return
    with pytest.raises(ConfigurationError, match=f"its=.*this {text}"):
        check_dtypes(names, "this", **options)


def test_facts_about_parameters():
    found = {parameter.name: parameter for parameter in parameters_of(Toy())}
    assert "frozen.weight" not in found
    assert "head.weight" not in found  # tied to the first table
    assert [name for name, its in found.items() if its.is_expert] == ["expert.weight"]
    assert [name for name, its in found.items() if its.is_excluded] == ["chosen.weight"]
    tables = [name for name, its in found.items() if its.is_embedding]
    assert tables == ["words.weight", "positions.weight"]
    assert not any(its.is_router or its.of_own_module for its in found.values())
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
    assert all(its.of_own_module for its in parameters_of(model))
    output = marked((4, 4), is_embedding_or_output_parameter=True)
    (its,) = parameters_of(layers(a=output))
    assert its.is_embedding
    weight = marked((4, 4))
    (its,) = trainable_parameters(places_in([layers(a=weight)]), [weight])
    assert its.is_embedding


def test_the_first_layers_weight_is_the_input_if_others_follow():
    one, two = (torch.nn.Linear(4, 4) for _ in "12")
    named = {its.name: its.is_input for its in parameters_of(torch.nn.Sequential(one, two))}
    assert named == {"0.weight": True, "0.bias": False, "1.weight": False, "1.bias": False}
    assert not any(its.is_input for its in parameters_of(torch.nn.Sequential(one)))
    # what is no layer's weight does not count
    model = torch.nn.ModuleDict({"own": layers(latents=marked((4, 4))), "one": one, "two": two})
    assert [its.name for its in parameters_of(model) if its.is_input] == ["one.weight"]


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(torch.ones(2, 4, 4))


@pytest.mark.parametrize("options", [{}, {"stacks": False}, {"stacks": True}])
def test_a_module_of_experts_has_stacks_where_they_are_asked_for(options):
    (its,) = trainable_parameters(places_in([Experts()]), **options)
    assert its.is_stack == options.get("stacks", False)
    others = trainable_parameters(places_in([Toy()]), **options)
    assert not any(its.is_stack for its in others)


def test_a_tied_weight_is_what_one_of_its_places_says():
    def whys(model):
        return {its.name: its.why_vector for its in parameters_of(model)}

    layer = torch.nn.Linear(4, 4, bias=False)
    latents = layers(latents=marked((4, 4)), bias=marked((4,)))
    assert whys(latents) == {"latents": "not the weight of a layer", "bias": None}
    tied = torch.nn.ModuleDict({"own": layers(latents=layer.weight), "layer": layer})
    assert whys(tied) == {"own.latents": None}
    layer = torch.nn.Conv2d(4, 4, 2, bias=False)
    tied = torch.nn.ModuleDict({"own": layers(latents=layer.weight), "layer": layer})
    assert [its.convolution for its in parameters_of(tied)] == [layer]


def test_groups_of_another_function_become_overrides(monkeypatch):
    weights = [marked((2, 2)) for _ in "1234"]
    groups = [
        ([("wd_mult", 0.5), ("max_lr", 0.1)], weights[:1]),
        ([("max_lr", 0.1), ("wd_mult", 0.5)], weights[1:2]),
        ([("max_lr", 0.2)], weights[2:3]),
        ([], weights[3:]),
    ]
    found = overrides_of(groups)
    assert [*found.values()] == [{"max_lr": 0.1, "wd_mult": 0.5}, {"max_lr": 0.2}]
    matched = [[key.matches(weight, "") for weight in weights] for key in found]
    assert matched == [[True, True, False, False], [False, False, True, False]]

    settings, given = resolve(muon(min_lr=0.01)), {FIRST: {"wd_mult": 0.5}}

    def grouping(chunks, config, overrides):
        assert overrides is given
        usual = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "min_lr": 0.01}
        own = {"is_expert_parallel": True, "default_config": False, "max_lr": 0.1}
        differing = {**own, "own": 3, "wd_mult": 0.5}
        return [{"params": weights[:1], **usual, **differing}, {"params": [], **usual, **own}]

    for function, expected in ((grouping, [{"own": 3, "wd_mult": 0.5}]), (None, None)):
        monkeypatch.setattr(grouping_of, "find_upstream", lambda _, its=function: its)
        found = grouping_of.with_callers_grouping(settings, [], given)
        assert [*found.values()] == expected if expected else found is given
    monkeypatch.undo()
    assert grouping_of.with_callers_grouping(settings, [], given) is given


def test_a_third_party_optimizer_takes_everything_or_has_its_own_overrides(monkeypatch):
    registry.entries()
    monkeypatch.setattr(registry, "_entries", dict(registry.entries()))
    own = {ParamKey(name="*.bias"): {"wd_mult": 0.5}}
    for name, overrides in (("plain", {}), ("own", own)):
        how = {"state_layout": "element_wise", "prefixes": ("muon",)}
        register_optimizer(name, torch.optim.SGD, default_param_overrides=overrides, **how)
    for name in ("own", "adam"):
        with pytest.raises(ConfigurationError, match="already"):
            register_optimizer(name, torch.optim.SGD)
    plain = routes_of(OptimizerConfig(optimizer="plain", lr=0.1))
    assert {route.optimizer for route in plain.values()} == {"plain"}
    model = torch.nn.ModuleDict({"toy": Toy(), "router": Gate()})
    fields = {"lr": 0.1, "muon_orthogonalize_router": False}
    plain = routes_of(EmergingOptimizerConfig(optimizer="plain", **fields), model=model)
    # the setting is about optimizers that leave some parameters to another one
    assert plain["router.weight"].optimizer == "plain"
    routes = routes_of(EmergingOptimizerConfig(optimizer="own", **fields), model=model)
    assert routes["router.weight"].optimizer == "adam"
    assert routes["toy.first.bias"].values == {"wd_mult": 0.5}
    assert routes["toy.first.weight"].values == {}


@pytest.mark.parametrize("recommended", [False, True])
@pytest.mark.parametrize("of_dtensors", [False, True])
def test_modules_tell_what_is_no_layers_weight_in_own_loops(recommended, of_dtensors):
    settings = replace(resolve(muon()), recommended=recommended, of_dtensors=of_dtensors)
    (route,) = rules.route_all(parameters_of(layers(latents=marked((4, 4)))), {}, settings)
    assert route.optimizer == ("adam" if recommended or of_dtensors else "muon")


@pytest.mark.parametrize(
    ("values", "rates", "expected"),
    [
        ({}, (0.1, 0.01), {"max_lr": 0.1, "min_lr": 0.01, "default_config": True}),
        ({}, (None, None), {"default_config": True}),
        ({"wd_mult": 0.5}, (0.1, 0.2), {"max_lr": 0.1, "default_config": True}),
        ({"max_lr": 0.2}, (0.1, 0.2), {"max_lr": 0.2, "lr": 0.2, "default_config": False}),
        ({"max_lr": 0.2}, (0.1, None), {"max_lr": 0.2, "lr": 0.2, "default_config": False}),
        ({"max_lr": 0.1}, (0.1, 0.2), None),
        ({"min_lr": 0.2}, (0.1, 0.01), None),
        ({"min_lr": 0.2}, (None, 0.01), {"min_lr": 0.2, "default_config": False}),
        ({"start_wd": 0.0}, (0.1, 0.01), {"weight_decay": 0.0, "default_config": True}),
    ],
)
def test_a_groups_dictionary(values, rates, expected):
    routes = routes_of(EmergingOptimizerConfig(lr=0.1), {ParamKey(name="*"): values})
    group = groups_of([routes["expert.weight"]])[0]
    lr, min_lr = rates
    if expected is None:
        with pytest.raises(ConfigurationError, match="is below the lowest learning rate"):
            param_group(group, [], lr=lr, min_lr=min_lr)
        return
    made = param_group(group, ["its"], lr=lr, min_lr=min_lr)
    assert made.items() >= expected.items()
    assert made["params"] == ["its"]
    assert made["is_expert_parallel"]
    assert ("lr" in made) == ("lr" in expected)
    assert ("max_lr" in made) == (lr is not None or "max_lr" in values)


def test_identities_of_groups_that_differ_in_values_only():
    keys = {name: ParamKey(name=f"{name}.*") for name in ("first", "norm", "words", "positions")}
    betas = [(0.5, 0.5), (0.9, 0.5), (0.9, 0.5), (0.9, 0.6)]
    overrides = {key: {"betas": its} for key, its in zip(keys.values(), betas, strict=True)}
    overrides[ParamKey(name=("words.*", "positions.*"))] = {"wd_mult": 1.0}
    named = identities(EmergingOptimizerConfig(lr=0.1), overrides)
    assert named["chosen.weight"] == "adam/dense/"
    assert named["expert.weight"] == "adam/expert/"
    assert named["first.weight"] == "adam/dense/betas/name=first.*"
    assert named["norm.weight"] == "adam/dense/betas/name=norm.*"
    assert named["words.weight"].startswith("adam/dense/betas+wd_mult/name=")


def test_groups_that_nothing_else_tells_apart_are_numbered_in_the_order_of_their_values():
    standard = {
        ParamKey(name=name): {"wd_mult": value}
        for name, value in (("first.bias", 10.0), ("norm.bias", 9.0))
    }
    routes = rules.route_all(parameters_of(Toy()), {}, resolve(OptimizerConfig(lr=0.1)), standard)
    named = {dict(group.key.values).get("wd_mult"): group.identity for group in groups_of(routes)}
    assert (named[9.0], named[10.0]) == ("adam/dense/wd_mult//0", "adam/dense/wd_mult//1")


def test_groups_that_differ_in_nothing_but_their_identity_are_told_apart():
    groups = [{GROUP_ID: f"adam/dense/betas/{name}", "optimizer": "adam"} for name in "ab"]
    assert find_groups(groups, groups[::-1]) == [1, 0]
