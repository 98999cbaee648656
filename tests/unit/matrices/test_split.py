from dataclasses import replace
from typing import Any

import pytest

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.matrices import (
    Field,
    Part,
    Section,
    Split,
    gated,
    local_shape,
    matrix_columns,
    per_head,
    periodic,
    qkv,
    side_by_side,
    transposed,
    whole,
)

ONE_HEAD = (4, 5)


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        # Llama-3-8B: 32 heads of 128, 8 groups
        (
            qkv((6144, 4096), [512, 128, 128]),
            [("q", 1, (4096, 4096)), ("k", 1, (1024, 4096)), ("v", 1, (1024, 4096))],
        ),
        (
            qkv((12 * 4, 5), [8, 8, 4, 4], head_dim=4),
            [("q", 4, ONE_HEAD), ("gate", 4, ONE_HEAD), ("k", 2, ONE_HEAD), ("v", 2, ONE_HEAD)],
        ),
        (gated((3, 8, 2)), [("gate", 3, (4, 2)), ("up", 3, (4, 2))]),
        (gated((16, 2), interleave=4), [("gate", 1, (8, 2)), ("up", 1, (8, 2))]),
        (whole((3, 4)), [("weight", 1, (3, 4))]),
        (whole((2, 3, 4)), [("weight", 2, (3, 4))]),
    ],
)
def test_parts(split: Split, parts: list[tuple[str, int, tuple[int, int]]]) -> None:
    assert split.parts == tuple(Part(*part) for part in parts)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: qkv((25, 4), [4, 1, 1]), ["(25, 4)", "25 rows", "24", "(q 4 | k 1 | v 1) x 4"]),
        (lambda: qkv((24, 4), [4, 2]), ["qkv_split_shapes=(4, 2)", "q, gate, k, v"]),
        (lambda: gated((7, 4)), ["(7, 4)", "7 rows", "has 6"]),
        (lambda: gated((20, 4), interleave=4), ["(20, 4)", "16"]),
        (lambda: side_by_side("x", (9, 4), {"a": 4, "b": 4}), ["(9, 4)", "8", "a 4 | b 4"]),
        (lambda: replace(transposed(gated((8, 4))), shape=(4, 9)), ["(4, 9)", "9 columns", "8"]),
        (lambda: whole((4,)), ["(4,)", "(rows, cols)"]),
        (lambda: periodic("x", (8, 2), {"a": 4}, units={"a": 3}), ["a=(4, 2, 3)", "divide"]),
    ],
)
def test_a_split_that_does_not_fit_is_an_error(make: object, words: list[str]) -> None:
    assert callable(make)
    with pytest.raises(ConfigurationError) as error:
        make()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: qkv((64, 32), [32, 2.0, 30]), "rows of 'k'=2.0 .*must be an integer"),
        (lambda: qkv((64, 32), ["32", 2, 30]), "rows of 'q'='32' .*must be an integer"),
        (lambda: qkv((64, 32), 64), "qkv_split_shapes=64 .*must be a sequence"),
        (lambda: qkv((64, 32), [32, 16, 16], head_dim=8.0), "matrix in 'q'=8.0"),
        (lambda: qkv((64, 32), [32, -2, 34]), "rows of 'k'=-2: must be an integer of at least 1"),
        (lambda: gated((8.0, 4)), "shape=8.0"),
        (lambda: gated((8, 4), interleave=2.0), "rows of 'gate'=2.0"),
        (lambda: gated(8), "shape=8 .*must be a sequence"),
        (lambda: whole((8,)), r"shape=\(8,\): must be \(rows, cols\)"),
        (lambda: whole((8, 0)), "positive sizes"),
        (lambda: per_head((8, 4), 3), "unit must divide"),
        (lambda: per_head((8, 4), True), "must be an integer"),
        (lambda: side_by_side("linear_attention", (8, 4), {"a": 8.0}), "rows of 'a'=8.0"),
        (lambda: periodic("mla", (8, 4), {"a": None}), "rows of 'a'=None"),
        (lambda: Section((Field("a", 4),), blocks=2.5), "blocks=2.5"),
        (lambda: transposed((8, 4)), "must be a Split"),
    ],
)
def test_a_declaration_is_checked_when_it_is_made(make: Any, words: str) -> None:
    with pytest.raises((ConfigurationError, ConfigurationTypeError), match=words):
        make()


def test_a_transposed_split_cuts_columns() -> None:
    split = transposed(qkv((8, 5), [2, 1, 1], head_dim=1))
    assert split.shape == (5, 8)
    assert split.parts == (Part("q", 4, (5, 1)), Part("k", 2, (5, 1)), Part("v", 2, (5, 1)))
    # its rows are cut, not those of its matrices, as often as these are
    assert local_shape(split, 5, 0) == (1, 8)
    assert matrix_columns(split)[:3] == [[(0, 1)], [(1, 1)], [(4, 1)]]
    assert matrix_columns(transposed(qkv((8, 5), [2, 1, 1])))[0] == [(0, 2), (4, 2)]
    assert transposed(split) == qkv((8, 5), [2, 1, 1], head_dim=1)


def test_a_convolutions_shape_is_folded() -> None:
    assert whole((8, 3, 2, 2)).shape == (8, 12)
    assert gated((8, 3, 2, 2)).parts == (Part("gate", 1, (4, 12)), Part("up", 1, (4, 12)))
