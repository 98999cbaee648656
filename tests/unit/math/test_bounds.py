"""Coefficients give emerging-optimizers' schedules, and never huge updates, or are refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_eopt.optimizers.built_in  # noqa: F401  registers optimizers
from benchmarks.newton_schulz_accuracy import degenerate, in_form, largest_value
from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.config.settings import resolve
from megatron_eopt.math import backends, coefficient_names, resolve_coefficients
from megatron_eopt.math.backends import Backend, register_backend
from megatron_eopt.math.coefficients import largest, response, table
from megatron_eopt.math.orthogonalize import Orthogonalization, orthogonalize
from megatron_eopt.wrappers.config import EmergingOptimizerConfig
from tests.harness.tiers import mostly_long
from tests.unit.math.spectra import relative_error

SHAPES = ((96, 96), (1, 96), (96, 400))


@pytest.mark.parametrize("algorithm", ["auto", "standard", "gram"])
@pytest.mark.parametrize("steps", mostly_long([1, 3, 5, 7, 12], 1, 5))
@pytest.mark.parametrize("name", coefficient_names())
def test_updates_are_as_large_as_in_exact_arithmetic(name, steps, algorithm):
    schedule = resolve_coefficients(name, steps)
    for x in (x for shape in SHAPES for x in degenerate(*shape).values()):
        for precision in ("highest", "high", "medium"):
            how = {"algorithm": algorithm, "precision": precision}
            result = orthogonalize(x, coefficients=name, steps=steps, **how)
            assert largest_value(result) <= 1.05 * max(1.0, largest(schedule))


@pytest.mark.parametrize("name", mostly_long(coefficient_names(), "quintic", "cans"))
def test_so_are_16_bit_updates_of_large_matrices(name):
    for steps in (5, 8):
        for x in degenerate(256, 1024).values():
            result = orthogonalize(x, coefficients=name, steps=steps, precision="medium")
            most = 1.05 * max(1.0, largest(resolve_coefficients(name, steps)))
            assert largest_value(result) <= most


def test_cans_is_what_16_bits_would_make_diverge():
    x, schedule = torch.ones(96, 96), resolve_coefficients("cans", 5)
    assert largest_value(in_form(x, schedule, "bfloat16, standard")) > 1e3
    assert largest_value(orthogonalize(x, coefficients="cans", precision="medium")) < 1.05


triples = st.tuples(st.floats(-5, 5), st.floats(-20, 20), st.floats(-20, 20))


@settings(max_examples=200, deadline=None)
@given(st.lists(triples, min_size=1, max_size=4))
def test_the_largest_value_bounds_the_values_of_a_schedule(schedule):
    most = largest(schedule)
    found = max(abs(response(schedule, sigma / 500)) for sigma in range(501))
    assert found <= most * (1 + 1e-9) + 1e-12
    if len(schedule) == 1 and math.isfinite(most):
        assert most <= found * 1.01 + 1e-2
    assert most <= largest(schedule, 2.0**-7)


def test_what_computes_in_16_bits_alone_is_refused(monkeypatch):
    monkeypatch.setattr(backends, "_LOADED", {})
    register_backend("half", Backend(lambda wide, *_: wide, half=True))
    with pytest.raises(ConfigurationError, match=r"'cans'.*diverge in 16 bits"):
        Orthogonalization("cans", precision="medium", backend="half")
    Orthogonalization("quintic", precision="medium", backend="half")


@pytest.mark.parametrize("optimizer", ["muon_hyperball", "sinkhorn_muon"])
def test_so_are_optimizers_with_an_iteration_of_their_own(optimizer):
    fields = {"optimizer": optimizer, "lr": 0.1, "muon_coefficient_type": "cans"}
    with pytest.raises(ConfigurationError, match=r"muon_coefficient_type='cans'.*diverges"):
        resolve(EmergingOptimizerConfig(**fields))
    resolve(EmergingOptimizerConfig(**fields, muon_fp32_matmul_prec="highest"))


@pytest.mark.parametrize("name", coefficient_names())
@pytest.mark.parametrize("extra", [-1, 0, 3])
def test_schedules_of_any_length_behave_as_emerging_optimizers(name: str, extra: int) -> None:
    steps = max(1, len(table(name)) + extra)
    x = torch.randn(12, 20, generator=torch.Generator().manual_seed(1))
    expected = muon_utils.newton_schulz(x, steps, name)
    result = orthogonalize(x, coefficients=name, steps=steps, algorithm="standard")
    # the same float32 products on inputs that differ by the rounding of one norm
    assert relative_error(result, expected) < 2e-5


def test_a_set_of_ones_own_starts_again_after_its_last_triple() -> None:
    first, second = (2.0, -1.5, 0.5), (1.875, -1.25, 0.375)
    assert resolve_coefficients([first, second], 3) == (first, second, first)
    for one in ([list(first)], first, np.array(first), torch.tensor([first])):
        assert resolve_coefficients(one, 2) == (first, first)
    assert resolve_coefficients((3, -3, 1), 1) == ((3.0, -3.0, 1.0),)


@pytest.mark.parametrize(
    "other", [(1.0, 2.0), [(2.0, -1.5, 0.5), (1.0,)], (), 3, None, {1.0: 2}, (True, False, True)]
)
def test_what_is_neither_a_name_nor_triples_is_refused(other: Any) -> None:
    with pytest.raises(ConfigurationTypeError, match=r"coefficients=.*Give \(a, b, c\), or a list"):
        resolve_coefficients(other, 5)


def test_a_set_that_diverges_is_refused() -> None:
    for triple in ((30.0, 20.0, 10.0), (1.0, 2.0, float("nan"))):
        with pytest.raises(ConfigurationError, match=r"coefficients=.*in 5 steps: it diverges"):
            resolve_coefficients([triple], 5)
    # maps [0, 1] to itself, but rounding above 1 grows 25-fold in each step
    with pytest.raises(ConfigurationError, match="it diverges"):
        resolve_coefficients([(5.0, -20.0, 16.0)], 12)
    # updates that are zero, or go uphill
    for triple, result in (((0.0, 0.0, 0.0), "0"), ((-1.0, 0.0, 0.0), "-0.001")):
        with pytest.raises(ConfigurationError, match=rf"of 0\.001 into {result} in 5 steps"):
            resolve_coefficients(triple, 5)
