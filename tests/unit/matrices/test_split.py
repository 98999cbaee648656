import pytest

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.matrices import Part, Split, gated, periodic, qkv, side_by_side, whole

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
