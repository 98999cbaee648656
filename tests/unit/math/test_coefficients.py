from typing import Any

import numpy as np
import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.math.coefficients import coefficient_names, resolve_coefficients, table
from megatron_eopt.math.orthogonalize import orthogonalize
from tests.unit.math.spectra import relative_error


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
