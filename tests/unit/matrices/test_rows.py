from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.matrices import Split, gated, matrix_rows, whole
from tests.unit.matrices.oracle import rows_of_rank
from tests.unit.matrices.strategies import randomly, splits

cuts = st.integers(1, 4).flatmap(lambda tp: st.tuples(st.just(tp), splits(tp)))


@randomly
@given(cuts)
def test_every_local_row_is_the_row_that_naive_loops_find(cut: tuple[int, Split]) -> None:
    tp_size, split = cut
    part_of = [
        (number, index) for number, part in enumerate(split.parts) for index in range(part.count)
    ]
    for rank in range(tp_size):
        expected = rows_of_rank(split, tp_size, rank)
        found: list[tuple[int, int] | None] = [None] * len(expected)
        rows = matrix_rows(split, tp_size, rank, 0)
        for (number, index), matrix, runs in zip(part_of, split.matrices, rows, strict=True):
            for local, logical, length in runs.triples():
                assert logical >= 0
                assert logical + length <= matrix.shape[0]
                for row in range(length):
                    assert found[local + row] is None
                    found[local + row] = (number, index * matrix.shape[0] + logical + row)
        assert found == expected


@randomly
@given(cuts)
def test_cut_columns_put_each_element_where_it_belongs(cut: tuple[int, Split]) -> None:
    tp_size, split = cut
    rows = np.arange(split.experts * split.rows * split.cols).reshape(-1, split.cols)
    stacks: list[list[int]] = [[] for _ in split.parts]
    for local, (part, _) in enumerate(rows_of_rank(split, 1, 0)):
        stacks[part] += rows[local].tolist()
    rebuilt = [np.full(matrix.shape, -1) for matrix in split.matrices]
    for rank in range(tp_size):
        held = np.split(rows, tp_size, axis=1)[rank]
        for matrix, runs in zip(rebuilt, matrix_rows(split, tp_size, rank, 1), strict=True):
            columns = slice(runs.first_col, runs.first_col + runs.held_cols)
            for local, logical, length in runs.triples():
                matrix[logical : logical + length, columns] = held[local : local + length]
    found = [matrix.reshape(-1) for matrix in rebuilt]
    assert np.concatenate(found).tolist() == list(chain(*stacks))


@pytest.mark.parametrize(
    ("split", "tp_size", "partition_dim", "words"),
    [
        (gated((12, 4)), 4, 0, ["tp_size=4", "gate 6 | up 6"]),
        (whole((12, 4)), 3, 1, ["tp_size=3", "columns"]),
    ],
)
def test_an_uneven_cut_is_an_error(
    split: Split, tp_size: int, partition_dim: int, words: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as error:
        matrix_rows(split, tp_size, 0, partition_dim)
    assert all(word in str(error.value) for word in words)
