"""What is copied from packages that are not imported is what they have."""

import dataclasses
import importlib

import torch
from emerging_optimizers import psgd, registry, riemannian_optimizers, scalar_optimizers, soap
from emerging_optimizers.orthogonalized_optimizers import Muon, muon_utils
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer import get_standard_config_overrides as megatrons
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from megatron.core.optimizer.optimizer_config import ParamKey

from megatron_eopt import EmergingOptimizerConfig, TorchOptimizerConfig, build_optimizer
from megatron_eopt.config.config import LIKE_MEGATRON
from megatron_eopt.config.keys import get_standard_config_overrides, is_key, meaning_of
from megatron_eopt.config.registry import entries, entry_of
from megatron_eopt.math import coefficient_names, resolve_coefficients
from megatron_eopt.math.coefficients import _REPEAT_LAST, table
from megatron_eopt.optimizers.built_in import _CLASSES, _VARIANTS_OF_MUON
from megatron_eopt.state.groups import _IDENTIFIERS

PACKAGES = (psgd, riemannian_optimizers, scalar_optimizers, soap)
"""Importing them registers their optimizers."""


def defaults_of(cls: type) -> dict[str, object]:
    return {field.name: getattr(cls(), field.name) for field in dataclasses.fields(cls)}


def test_shared_defaults_are_megatron_cores_but_for_those_that_are_listed():
    ours, theirs = defaults_of(TorchOptimizerConfig), defaults_of(OptimizerConfig)
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 30
    differing = {name for name in shared if ours[name] != theirs[name]}
    assert differing == LIKE_MEGATRON.keys() & theirs.keys()
    assert {name: LIKE_MEGATRON[name] for name in differing} == {n: theirs[n] for n in differing}


def test_the_class_for_megatron_adds_no_field_and_keeps_the_order():
    names = [field.name for field in dataclasses.fields(EmergingOptimizerConfig)]
    theirs = [field.name for field in dataclasses.fields(OptimizerConfig)]
    ours = [field.name for field in dataclasses.fields(TorchOptimizerConfig)]
    assert names == [*theirs, *(name for name in ours if name not in theirs)]
    config = EmergingOptimizerConfig(lr=0.5)
    assert isinstance(config, TorchOptimizerConfig)
    assert dataclasses.replace(config, muon_lr=0.1).lr == 0.5


def test_coefficients_are_emerging_optimizers_in_every_number_of_steps():
    sets = muon_utils._COEFFICIENT_SETS
    assert set(coefficient_names()) == set(sets)
    for name, rows in sets.items():
        assert table(name) == tuple(map(tuple, rows))
        for steps in (1, 3, len(rows), len(rows) + 3):
            mode = "repeat_last" if name in _REPEAT_LAST else "cycle"
            theirs = muon_utils.get_coefficient_iterator(steps, rows, mode=mode)
            assert resolve_coefficients(name, steps) == tuple(theirs)


def test_every_class_of_emerging_optimizers_is_known_by_its_path():
    assert PACKAGES
    names = set(registry.get_optimizer_name_list())
    assert names <= entries().keys()
    for name in names - {"muon", "adaptive_muon"}:
        cls = registry.get_optimizer_cls(name)
        assert entry_of(name).optimizer_cls is cls
        module, _, called = f"emerging_optimizers.{_CLASSES[name]}".rpartition(".")
        assert getattr(importlib.import_module(module), called) is cls
        assert issubclass(cls, Muon) == (name in _VARIANTS_OF_MUON)


def test_groups_are_identified_as_in_megatron_core():
    assert set(_IDENTIFIERS) == set(param_group_identifier_keys)


def test_standard_overrides_mean_what_megatron_cores_mean():
    decoupled = {"decoupled_lr": 0.1, "decoupled_min_lr": 0.01}
    for fields in ({}, {"apply_wd_to_qk_layernorm": True}, decoupled):
        config = OptimizerConfig(lr=1.0, **fields)
        ours, theirs = get_standard_config_overrides(config), megatrons(config)
        assert all(map(is_key, [*ours, *theirs]))
        meant = {meaning_of(key): dict(values) for key, values in theirs.items()}
        assert {meaning_of(key): values for key, values in ours.items()} == meant
        names = ("a.weight", "a.bias", "q_layernorm.weight", "k_layernorm.bias")
        for mine, other in zip(ours, theirs, strict=True):
            for shape in ((3,), (3, 3), ()):
                param = torch.nn.Parameter(torch.zeros(shape))
                for name in names:
                    assert mine.matches(param, name) == other.matches(param, name)


@dataclasses.dataclass
class Foreign:
    """A configuration that knows nothing of this package."""

    optimizer: str = "muon"
    lr: float = 0.1
    weight_decay: float = 0.0
    muon_momentum: float = 0.7


def test_any_dataclass_and_keys_of_megatron_core_build_an_own_loops_optimizer():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    overrides = {ParamKey(name="0.weight"): {"lr": 0.3}}
    optimizer = build_optimizer(model, Foreign(), overrides)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    rates = {g["lr"] for g in optimizer.param_groups if g["optimizer"] == "muon"}
    assert rates == {0.1, 0.3}
    assert {g["momentum"] for g in optimizer.param_groups if "momentum" in g} == {0.7}
