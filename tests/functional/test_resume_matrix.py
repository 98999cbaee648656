"""Every optimizer goes on from a checkpoint as if it had not stopped, or is refused when built."""

import pytest

from tests.functional import resume_matrix
from tests.functional.resume_matrix import (
    DTYPES,
    EQUAL,
    LAYOUTS,
    MAIN,
    OTHERS,
    STORAGES,
    TABLE,
    Cell,
    cells,
    in_docs,
    outcomes,
    table,
)

SHORT = {(2, 2): "bf16"}
"""What the normal tier runs: layouts, each with one data type."""


def wrong(results: dict[Cell, str]) -> dict[Cell, str]:
    return {
        cell: result
        for cell, result in results.items()
        if result != EQUAL and not result.startswith("refused: ")
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", SHORT, ids="TP {0[0]} x DP {0[1]}".format)
@pytest.mark.parametrize(
    "storage",
    [pytest.param(s, marks=[] if s == "sharded" else pytest.mark.long) for s in STORAGES],
)
def test_the_main_optimizers_go_on(storage, layout):
    results = outcomes(cells(MAIN, storage, layout, [SHORT[layout]]))
    assert len(results) == len(MAIN)
    assert set(results.values()) == {EQUAL}


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_optimizer_goes_on_in_every_layout():
    results: dict[Cell, str] = {}
    for some in resume_matrix.all_outcomes():
        results |= some
    assert len(results) == len((*MAIN, *OTHERS)) * len(STORAGES) * len(LAYOUTS) * len(DTYPES)
    assert wrong(results) == {}
    assert in_docs(TABLE.read_text()) == table(results)


def test_what_differs_is_no_outcome_for_the_table():
    cell = Cell("muon", "sharded", 1, 1, "fp32")
    assert wrong({cell: "differs: a.weight"}) == {cell: "differs: a.weight"}
    with pytest.raises(ValueError, match="neither"):
        table({cell: "differs: a.weight"})
