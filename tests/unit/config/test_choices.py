"""Every value of every choice is refused when an optimizer is built, or its steps work.

emerging-optimizers' classes have lists of their own, and notice a value they do not know in a step.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any, get_origin

import pytest
import torch
from megatron.core.optimizer import ParamKey
from torch import nn

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig, EmergingOptimizerEntry
from megatron_eopt.arguments.flags import choices_of_trainer_flags
from megatron_eopt.config.fields import constructor_parameters, field_types, set_arguments, type_of
from megatron_eopt.config.registry import entry_of, optimizer_names, prefixes_of, registered
from megatron_eopt.config.settings import resolve
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.math import coefficient_names
from megatron_eopt.math.orthogonalize import scale_factor
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import eager

STANDARD = ("adam", "sgd")
CHOICES = choices_of_trainer_flags()
NUMBERS: dict[type, list[Any]] = {
    bool: [False, True],
    int: [-1, 0, 1, 3],
    float: [-1.0, 0.0, 0.5, 1.0, 3.0],
}
PAIRS = [(0.0, 0.0), (1.0, 0.9), (0.9, 1.0), (-0.5, 0.9), (0.9, math.nan), (0.9,), (0.9, 0.9, 0.9)]
OTHER: dict[type, list[Any]] = {
    bool: ["false", 2, 0.5],
    int: [0.5, "3"],
    float: [math.nan, math.inf, "0.9", True],
    tuple: [0.9, ("a", "b"), None],
}
"""Values that no argument of a type can be."""

WORDS = sorted(
    {word for name, words in CHOICES.items() if name != "optimizer" for word in words}
    | {"custom", "independent", "l2", "nuclear_norm", "palm"}
)
"""Any word may be given for any argument that takes words."""


def cases(optimizer: str) -> Iterator[tuple[str, Any]]:
    """Yield each field that this optimizer may read, with each value."""
    prefixes = tuple(f"{prefix}_" for prefix in (*prefixes_of(optimizer), "adam", "lion", "sgd"))
    for name, kind in field_types(EmergingOptimizerConfig).items():
        if name.startswith(prefixes) or name in ("lr", "weight_decay", "decoupled_weight_decay"):
            words = CHOICES.get(name, kind.choices)
            yield from ((name, value) for value in words or NUMBERS.get(kind.type, ()))
    if optimizer in STANDARD:
        return
    # fields that a user's own subclass of the configuration may have
    for name, parameter in constructor_parameters(entry_of(optimizer).optimizer_cls).items():
        field, kind = f"{prefixes_of(optimizer)[0]}_{name}", type_of(parameter.annotation)
        if isinstance(parameter.default, str) or kind.choices:
            yield from ((field, word) for word in WORDS)
        # Lion's come from its own fields
        elif optimizer != "lion":
            pairs = PAIRS if get_origin(kind.type) is tuple else []
            yield from ((field, value) for value in pairs or NUMBERS.get(kind.type, []))


def start(optimizer: str) -> nn.Linear:
    layer = nn.Linear(6, 6, bias=False)
    torch.manual_seed(0)
    if optimizer == "sinkhorn_muon":
        nn.init.constant_(layer.weight, 1 / 6)  # doubly stochastic
    else:
        nn.init.orthogonal_(layer.weight)  # its columns have unit length
    return layer


def outcome(optimizer: str, fields: dict[str, Any], overrides: Any = None) -> str:
    """Return the error of a build; empty if it succeeds, and two steps after it."""
    layer = start(optimizer)
    config = EmergingOptimizerConfig(optimizer=optimizer, lr=0.01)
    vars(config).update(fields)
    try:
        built = build_optimizer(nn.Sequential(layer), config, overrides)
    except ConfigurationError as error:
        return str(error)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        layer.weight.grad = torch.randn(6, 6, generator=generator)
        built.step()
    assert layer.weight.isfinite().all(), fields
    return ""


@pytest.mark.parametrize(
    "optimizer",
    mostly_long(
        optimizer_names(), "muon", "adaptive_muon", "soap", "lion", "adam", "muon_hyperball"
    ),
)
@eager
def test_what_is_built_steps(optimizer: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    assert not outcome(optimizer, {})
    tried = refused = 0
    for name, value in cases(optimizer):
        error = outcome(optimizer, {name: value})
        # a radius that is not the weights' own
        is_start = name == "muon_hyperball_hyperball_radius" and "cannot start from" in error
        assert not error or is_start or repr(value) in error or name in error, (name, error)
        tried, refused = tried + 1, refused + bool(error)
    assert tried > refused > 0


@pytest.mark.parametrize("optimizer", sorted({*optimizer_names()} - {*STANDARD, "lion"}))
def test_a_value_of_another_type_is_refused(optimizer: str) -> None:
    tried = 0
    for argument, parameter in constructor_parameters(entry_of(optimizer).optimizer_cls).items():
        name, kind = f"{prefixes_of(optimizer)[0]}_{argument}", type_of(parameter.annotation).type
        for value in OTHER.get(get_origin(kind) or kind, []):
            error = outcome(optimizer, {name: value})
            assert error.startswith(name), (name, value, error)
            tried += 1
    assert tried


def test_an_error_says_what_the_class_knows() -> None:
    error = outcome("muon_hyperball", {"muon_hyperball_coefficient_type": "custom"})
    for word in coefficient_names():
        assert (word in error.partition(": ")[2]) == (word != "custom")


def test_so_do_single_parameters_and_fields_that_only_other_optimizers_have() -> None:
    override = {"optimizer": "muon_hyperball", "scale_mode": "adamw_rms"}
    error = outcome("muon", {}, {ParamKey(name="*"): override})
    assert "'scale_mode'" in error
    # of the configuration, the class gets the same factor in its own words
    fields = {"muon_scale_mode": "adamw_rms"}
    assert not outcome("muon", fields, {ParamKey(name="*"): {"optimizer": "muon_hyperball"}})
    config = EmergingOptimizerConfig(optimizer="muon_hyperball", muon_extra_scale_factor=0.5)
    found = set_arguments(entry_of("muon_hyperball").optimizer_cls, ("muon",), config)
    factor = found["scale_mode"][1], found["extra_scale_factor"][1]
    assert scale_factor(6, 4, "adamw_rms", 0.5) == scale_factor(6, 4, *factor)


@pytest.mark.parametrize("optimizer", ["scion", "spel"])
def test_coefficients_that_diverge_in_an_iteration_of_a_class_are_refused(optimizer: str) -> None:
    name = f"{optimizer}_coefficient_type"
    error = outcome(optimizer, {name: "cans"})
    assert error.startswith(f"{name}='cans': diverges with fp32_matmul_prec='medium'")
    assert not outcome(optimizer, {name: "cans", f"{optimizer}_fp32_matmul_prec": "highest"})


@pytest.mark.parametrize("layout", ["matrix_state", "matrix_update"])
def test_a_class_that_cannot_update_shards_gets_whole_matrices_of_fused_weights(
    layout: Any,
) -> None:
    entry = EmergingOptimizerEntry(torch.optim.Adagrad, state_layout=layout)
    with registered("own", entry):
        config = EmergingOptimizerConfig(optimizer="own", lr=0.1, use_distributed_optimizer=True)
        assert resolve(config).splits_weights_of("own")


def test_draws_of_an_optimizer_with_an_update_rule_are_refused() -> None:
    """They would be seeded in a step of its class, which nobody calls."""
    with pytest.raises(ConfigurationError, match=r"draws=.*matrix_update"):
        EmergingOptimizerEntry(torch.optim.Adagrad, state_layout="matrix_update", draws=True)
