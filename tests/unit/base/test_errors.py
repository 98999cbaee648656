"""Checks of values: an error that names argument, value, rule and way out."""

import pytest

from megatron_eopt.base.errors import ConfigurationError, check_number


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30, 10**400])
def test_an_int_that_torch_cannot_take_is_refused(value: int) -> None:
    with pytest.raises(ConfigurationError, match=r"eps.*64 bits.*as a float"):
        check_number("eps", value, above=-1e300)


@pytest.mark.parametrize("value", [1, 2**63 - 1, 1e30])
def test_numbers_that_fit_are_taken(value: float) -> None:
    check_number("eps", value, above=0)
