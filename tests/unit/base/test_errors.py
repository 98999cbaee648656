"""Checks of values: an error that names argument, value, rule and way out."""

import pytest

from megatron_eopt.base.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    check_integer,
)


@pytest.mark.parametrize("value", [0, -1, 8, 2**63, 10**30])
def test_integers_out_of_bounds_are_refused(value: int) -> None:
    with pytest.raises(ConfigurationError, match=r"steps=.*at least 1 and at most 7"):
        check_integer("steps", value, at_most=7)


@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_what_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(ConfigurationTypeError, match=r"steps=.*an integer"):
        check_integer("steps", value)
