"""The keyword contract between configuration fields and constructor arguments."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer import emerging_optimizers as theirs
from megatron.core.optimizer.optimizer_config import ParamKey
from torch import nn

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, register_optimizer
from megatron_eopt import emerging_optimizers as compat
from megatron_eopt.config import registry
from megatron_eopt.config.arguments import entry_kwargs
from megatron_eopt.config.fields import constructor_parameters, kwargs_from_config, unconsumed
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.overrides import own_arguments

SIZES = SimpleNamespace(num_attention_heads=8, num_query_groups=2, kv_channels=16)
MODEL = SimpleNamespace(config=SIZES)


class Example:
    def __init__(self, params, lr=0.1, momentum=0.9, nesterov=False, betas=(0.9, 0.99), eps=1.0):
        pass


def test_own_prefix_then_parents_then_plain():
    config = SimpleNamespace(lr=1, muon_lr=None, muon_momentum=3, mine_momentum=4, muon_nesterov=5)
    kwargs = kwargs_from_config(Example, ("mine", "muon"), config)
    assert kwargs == {"lr": 1, "momentum": 4, "nesterov": 5}


def test_weight_decay_follows_the_configuration():
    for decoupled in (True, False):
        config = OptimizerConfig(lr=0.1, decoupled_weight_decay=decoupled)
        muon = entry_kwargs("muon", config, [MODEL], None)
        assert muon["use_decoupled_weight_decay"] is decoupled
        method = entry_kwargs("soap", config, [MODEL], None)["weight_decay_method"]
        assert method == ("decoupled" if decoupled else "l2")
    with pytest.raises(ConfigurationError, match=r"decoupled_weight_decay=False: scion"):
        entry_kwargs("scion", OptimizerConfig(lr=0.1, decoupled_weight_decay=False), [MODEL], None)
    own = {**vars(OptimizerConfig(lr=0.1)), "soap_weight_decay_method": "independent"}
    method = entry_kwargs("soap", SimpleNamespace(**own), [MODEL], None)["weight_decay_method"]
    assert method == "independent"


def test_changed_fields_that_nobody_takes_are_found():
    config = OptimizerConfig(muon_momentum=0.8)
    assert unconsumed(config, ("muon",), {"muon_momentum"}) == []
    assert unconsumed(config, ("lion",), set()) == []
    assert unconsumed(config, ("muon",), set()) == ["muon_momentum"]
    config.muon_unheard_of = 1
    assert unconsumed(config, ("muon",), {"muon_momentum"}) == ["muon_unheard_of"]


def test_megatrons_helpers_give_what_megatrons_give():
    config = OptimizerConfig(optimizer="muon", lr=0.1, muon_num_ns_steps=7)
    # ours reads the sizes of fused weights where there are some
    fused = [("qkv", SimpleNamespace(is_qkv=True))]
    model = SimpleNamespace(config=MODEL.config, named_parameters=lambda: fused)
    ours = compat._muon_config_to_kwargs(config, [model], None)
    stock = theirs._muon_config_to_kwargs(config, [model], None)
    del stock["is_qkv_fn"]
    assert {name: ours[name] for name in stock} == stock
    gated = SimpleNamespace(**vars(MODEL.config), attention_output_gate=True)
    for sizes in (MODEL.config, gated):
        assert compat._get_qkv_split_shapes(sizes) == theirs._get_qkv_split_shapes(sizes)
    assert compat._default_param_overrides_factory() == theirs._default_param_overrides_factory()
    compat.validate_coefficient_type("polar_express")
    with pytest.raises(ValueError, match="nope"):
        compat.validate_coefficient_type("nope")


BAD: dict[str, Any] = {
    **dict.fromkeys(("lr", "weight_decay"), -1.0),
    "momentum": 1.0,
    **dict.fromkeys(("extra_scale_factor", "ns_eps", "matrix_buffer_mb"), 0.0),
    "num_ns_steps": 0,
    **dict.fromkeys(("coefficient_type", "fp32_matmul_prec", "scale_mode", "tp_mode"), "other"),
    **dict.fromkeys(("algorithm", "backend", "momentum_dtype", "weight_decay_method"), "other"),
}
"""A value out of bounds, or of no choice, for each argument of Muon that has bounds or choices."""

OF_ADAPTIVE_MUON = BAD | {"moment2_method": "other", "beta2": 1.0, "eps": 0.0}
FREE = "nesterov use_decoupled_weight_decay split_qkv is_qkv_fn qkv_split_shapes pg_collection"
FREE += " splits batched bias_correction cautious_weight_decay use_syrk"


@pytest.mark.parametrize(
    ("cls", "bad"),
    [(TensorParallelMuon, BAD), (TensorParallelAdaptiveMuon, OF_ADAPTIVE_MUON)],
)
def test_an_error_names_the_argument(cls, bad):
    assert set(constructor_parameters(cls)) - {*FREE.split()} == set(bad)
    for name, value in bad.items():
        with pytest.raises(ConfigurationError) as caught:
            cls(nn.Linear(4, 4, bias=False).parameters(), **{name: value})
        assert str(caught.value).startswith(f"{name}={value!r}")


@pytest.mark.parametrize(
    ("optimizer", "prefix", "bad"),
    [
        ("muon", "muon", BAD),
        ("adaptive_muon", "muon", BAD),
        ("adaptive_muon", "adaptive_muon", OF_ADAPTIVE_MUON),
    ],
)
def test_an_error_names_the_field_that_set_the_argument(optimizer, prefix, bad):
    for name, value in bad.items():
        config = EmergingOptimizerConfig(optimizer=optimizer, lr=0.1)
        setattr(config, f"{prefix}_{name}", value)
        with pytest.raises(ConfigurationError) as caught:
            build_optimizer(nn.Linear(4, 4), config)
        assert str(caught.value).startswith(f"{prefix}_{name}={value!r}")
        assert caught.value.argument == f"{prefix}_{name}"


def test_an_error_says_what_an_optimizer_of_ones_own_lacks(monkeypatch):
    registry.entries()
    monkeypatch.setattr(registry, "_entries", dict(registry.entries()))

    @register_optimizer("demanding", state_layout="element_wise")
    class Demanding(torch.optim.SGD):
        def __init__(self, params, lr, strength):
            super().__init__(params, lr)

    config = EmergingOptimizerConfig(optimizer="demanding", lr=0.1)
    with pytest.raises(ConfigurationError, match=r"demanding_strength=None: .* a subclass of"):
        build_optimizer(nn.Linear(4, 4), config)
    config.demanding_strength = 0.5
    with pytest.raises(ConfigurationError, match=r"='Demanding': .* Define _init_group\(group"):
        build_optimizer(nn.Linear(4, 4), config)


def test_an_error_names_the_fields_in_its_hint_or_the_override():
    config = EmergingOptimizerConfig(optimizer="muon", lr=0.1)
    with pytest.raises(ConfigurationError, match=r"raised an error: num_ns_steps=0"):
        build_optimizer(nn.Linear(4, 4), config, {ParamKey(name="*weight"): {"num_ns_steps": 0}})
    config.muon_algorithm, config.muon_backend = "gram", "emerging_optimizers"
    with pytest.raises(ConfigurationError, match=r"muon_algorithm='auto' or muon_backend='torch'"):
        build_optimizer(nn.Linear(4, 4), config)


class Plain(torch.optim.Optimizer):
    """Says nothing of its types, and has a setting that only groups can change."""

    def __init__(self, params, lr=0.1, power=2):
        super().__init__(params, {"lr": lr, "kept": 1.0})


def test_types_that_no_annotation_gives_are_those_of_the_values():
    construct = partial(Plain, [torch.ones(2)])
    assert own_arguments("plain", {"power": 3, "kept": 2.0}, construct) == {"power": 3}
    with pytest.raises((ConfigurationError, TypeError), match="kept"):
        own_arguments("plain", {"kept": "text"}, construct)
