"""Grouping is a partition, equal on all ranks, independent of order, and changes nothing."""

import copy
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from megatron.core.optimizer import ParamKey

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.routing.groups import param_group
from tests.unit.routing.toy import groups_of, routes_of

LAYERS = ("first", "second", "third", "norm")
CONFIG = EmergingOptimizerConfig(optimizer="muon", lr=0.1, min_lr=0.01)


@st.composite
def models(draw: st.DrawFn) -> torch.nn.Module:
    """A model with some of the layers, some frozen, some expert's, some tied."""
    model = torch.nn.Module()
    for name in draw(st.lists(st.sampled_from(LAYERS), min_size=1, unique=True)):
        layer = torch.nn.LayerNorm(4) if name == "norm" else torch.nn.Linear(4, 4)
        layer.requires_grad_(draw(st.booleans()))
        for param in layer.parameters():
            param.allreduce = draw(st.booleans())
        setattr(model, name, layer)
    if draw(st.booleans()) and hasattr(model, "first") and hasattr(model, "second"):
        model.second.weight = model.first.weight
    return model


# Each setting has one value, so that no two overrides disagree.
VALUES = {"wd_mult": 0.0, "max_lr": 0.5, "optimizer": "adam", "betas": (0.8, 0.9)}
SETTINGS = st.fixed_dictionaries({}, optional={name: st.just(its) for name, its in VALUES.items()})
KEYS = st.one_of(
    st.sampled_from([*(f"{name}.*" for name in LAYERS), "*.bias", "*", "nothing"]).map(
        lambda pattern: ParamKey(name=pattern)
    ),
    st.sampled_from(["allreduce", "sequence_parallel"]).map(lambda name: ParamKey(attr=name)),
)
OVERRIDES = st.dictionaries(KEYS, SETTINGS, max_size=4)


@settings(max_examples=60, deadline=None)
@given(st.lists(models(), min_size=1, max_size=3), OVERRIDES, st.randoms())
def test_grouping(ranks: list[torch.nn.Module], overrides: dict[Any, Any], random: Any) -> None:
    before = copy.deepcopy(overrides)
    grads = [[p.requires_grad for p in model.parameters()] for model in ranks]
    routes = [list(routes_of(CONFIG, overrides, model).values()) for model in ranks]
    groups = [groups_of(mine, *(r for r in routes if r is not mine)) for mine in routes]

    for model, mine in zip(ranks, groups, strict=True):
        held = [id(route.parameter.param) for group in mine for route in group.routes]
        trainable = {id(p) for p in model.parameters() if p.requires_grad}
        assert len(held) == len(set(held))
        assert set(held) == trainable
        assert [(g.identity, g.key) for g in mine] == [(g.identity, g.key) for g in groups[0]]
    assert len({g.identity for g in groups[0]}) == len(groups[0])

    shuffled = list(overrides.items())
    random.shuffle(shuffled)
    again = list(routes_of(CONFIG, dict(shuffled), ranks[0]).values())
    assert groups_of(again, *routes[1:]) == groups[0]
    assert overrides == before
    assert grads == [[p.requires_grad for p in model.parameters()] for model in ranks]
    for group in groups[0]:
        made = param_group(group, [], lr=CONFIG.lr, min_lr=CONFIG.min_lr)
        assert made["max_lr"] == dict(group.key.values).get("max_lr", CONFIG.lr)
        assert made["default_config"] == ("max_lr" not in dict(group.key.values))
