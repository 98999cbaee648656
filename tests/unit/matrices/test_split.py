import pytest

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.matrices import LogicalMatrix, Part, gated, periodic, qkv, side_by_side, whole


def test_grouped_queries() -> None:
    # Llama-3-8B: 32 heads of 128, 8 groups
    split = qkv((6144, 4096), [512, 128, 128])
    assert split.parts == (
        Part("q", 1, (4096, 4096)),
        Part("k", 1, (1024, 4096)),
        Part("v", 1, (1024, 4096)),
    )
    assert split.describe() == "(q 512 | k 128 | v 128) x 8"
    assert split.matrices[1] == LogicalMatrix("k", (1024, 4096))


def test_output_gate_and_heads() -> None:
    split = qkv((12 * 4, 5), [8, 8, 4, 4], head_dim=4)
    assert split.parts == (
        Part("q", 4, (4, 5)),
        Part("gate", 4, (4, 5)),
        Part("k", 2, (4, 5)),
        Part("v", 2, (4, 5)),
    )
    assert [matrix.name for matrix in split.matrices][:2] == ["q.0", "q.1"]


def test_gate_and_up() -> None:
    assert gated((3, 8, 2)).parts == (Part("gate", 3, (4, 2)), Part("up", 3, (4, 2)))
    interleaved = gated((16, 2), interleave=4)
    assert interleaved.describe() == "(gate 4 | up 4) x 2"
    assert interleaved.parts == gated((16, 2)).parts


def test_whole_weights() -> None:
    assert whole((3, 4)).matrices == (LogicalMatrix("weight", (3, 4)),)
    assert whole((2, 3, 4)).parts == (Part("weight", 2, (3, 4)),)
    assert whole((2, 3, 4)).kind == "experts"


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
