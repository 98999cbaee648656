"""Which cases of a table run for every change, and which in the long tests only."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_long(cases: Iterable[Any], *usual: Any) -> list[Any]:
    """Return cases of which the tests of every change run the ``usual`` ones only."""
    every = list(cases)
    assert all(case in every for case in usual), "a usual case is not among the cases"
    return [case if case in usual else _long(case) for case in every]


def _long(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
