import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.matrices import (
    Split,
    check_fits,
    gated,
    local_shape,
    periodic,
    qkv,
    whole,
)
from tests.reference.parts import merge_local, merge_parts, part_views, split_local, split_parts
from tests.unit.matrices.oracle import rows_of_rank
from tests.unit.matrices.strategies import randomly, splits


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Every element different, so that equality shows where each one went."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def naive_parts(tensor: torch.Tensor, split: Split) -> list[torch.Tensor]:
    rows = tensor.reshape(-1, split.cols)
    stacks: list[list[torch.Tensor]] = [[] for _ in split.parts]
    for row, (part, at) in zip(rows, rows_of_rank(split, 1, 0), strict=True):
        assert at == len(stacks[part])
        stacks[part].append(row)
    return [
        torch.stack(stack).reshape(part.count, *part.shape)
        for stack, part in zip(stacks, split.parts, strict=True)
    ]


@randomly
@given(splits())
def test_parts_equal_naive_loops_and_merge_is_the_inverse(split: Split) -> None:
    weight = numbered(split.shape)
    parts = split_parts(weight, split)
    for part, expected in zip(parts, naive_parts(weight, split), strict=True):
        assert torch.equal(part, expected)
    assert torch.equal(merge_parts(parts, split), weight)
    out = torch.full_like(weight, float("nan"))
    assert merge_parts(parts, split, out) is out
    assert torch.equal(out, weight)


@randomly
@given(splits())
def test_strides_do_not_matter(split: Split) -> None:
    weight = numbered(split.shape)
    strided = weight.mT.contiguous().mT
    for part, expected in zip(split_parts(strided, split), split_parts(weight, split), strict=True):
        assert torch.equal(part, expected)
    out = torch.zeros_like(strided)
    assert torch.equal(merge_parts(split_parts(weight, split), split, out), weight)


@randomly
@given(st.integers(1, 4).flatmap(lambda tp: st.tuples(st.just(tp), splits(tp))), st.booleans())
def test_pieces_of_all_ranks_make_the_matrices(cut: tuple[int, Split], columns: bool) -> None:
    tp_size, split = cut
    weight = numbered(split.shape)
    whole_matrices = [matrix for part in split_parts(weight, split) for matrix in part]
    rebuilt = [torch.full(matrix.shape, float("nan")) for matrix in split.matrices]
    for rank in range(tp_size):
        local = cut_by_hand(weight, split, tp_size, rank, columns)
        pieces = split_local(local, split, tp_size, rank, int(columns))
        assert torch.equal(
            merge_local([piece.clone() for piece in pieces], split, tp_size, rank, int(columns)),
            local,
        )
        place(rebuilt, pieces, split, tp_size, rank, columns)
    for found, expected in zip(rebuilt, whole_matrices, strict=True):
        assert torch.equal(found, expected)


def cut_by_hand(
    weight: torch.Tensor, split: Split, tp_size: int, rank: int, columns: bool
) -> torch.Tensor:
    if columns:
        return weight.chunk(tp_size, dim=-1)[rank].contiguous()
    pieces, base = [], 0
    for section in split.sections:
        pieces.append(weight.narrow(-2, base, section.rows).chunk(tp_size, dim=-2)[rank])
        base += section.rows
    return torch.cat(pieces, dim=-2)


def place(
    rebuilt: list[torch.Tensor],
    pieces: list[torch.Tensor],
    split: Split,
    tp_size: int,
    rank: int,
    columns: bool,
) -> None:
    """Write a rank's pieces into the matrices, finding each row by the oracle."""
    if columns:
        held = split.cols // tp_size
        for matrix, piece in zip(rebuilt, pieces, strict=True):
            matrix[:, rank * held : (rank + 1) * held] = piece
        return
    first = [sum(part.count for part in split.parts[:number]) for number in range(len(split.parts))]
    taken = [0] * len(rebuilt)
    for part, row in rows_of_rank(split, tp_size, rank):
        index, within = divmod(row, split.parts[part].shape[0])
        number = first[part] + index
        rebuilt[number][within] = pieces[number][taken[number]]
        taken[number] += 1
    assert taken == [len(piece) for piece in pieces]


def test_what_can_be_a_view_is_one() -> None:
    weight = numbered((8, 3))
    for split in (
        gated((8, 3)),
        whole((8, 3)),
        periodic("heads", (8, 3), {"a": 1, "b": 1}, units={"a": 1, "b": 1}),
    ):
        for part in split_parts(weight, split):
            assert part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    experts = numbered((2, 8, 3))
    gate, up = split_parts(experts, gated((2, 8, 3)))
    assert gate.untyped_storage().data_ptr() == experts.untyped_storage().data_ptr()
    assert torch.equal(up, experts[:, 4:])


def test_part_views_are_never_copies() -> None:
    weight = torch.zeros(16, 3).mT.contiguous().mT
    split = qkv((16, 3), [4, 2, 2])
    q, k, v = part_views(weight, split)
    assert q.shape == (1, 2, 4, 3)
    for number, view in enumerate((q, k, v), start=1):
        view.fill_(number)
    assert weight[:, 0].tolist() == 2 * [1, 1, 1, 1, 2, 2, 3, 3]


def test_merging_views_back_into_their_own_weight_changes_nothing() -> None:
    weight = numbered((8, 3))
    split = gated((8, 3))
    parts = split_parts(weight, split)
    parts[0].mul_(2)
    merge_parts(parts, split, weight)
    assert torch.equal(weight, torch.cat([2 * numbered((8, 3))[:4], numbered((8, 3))[4:]]))


def test_parts_may_come_without_the_stack_dimension() -> None:
    split = qkv((8, 3), [2, 1, 1])
    weight = numbered((8, 3))
    assert torch.equal(merge_parts([part[0] for part in split_parts(weight, split)], split), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_any_dtype_bit_for_bit(dtype: torch.dtype) -> None:
    split = qkv((24, 4), [4, 4, 2, 2], head_dim=2)
    weight = torch.randn(24, 4).to(dtype)
    merged = merge_parts(split_parts(weight, split), split)
    assert merged.dtype == dtype
    assert torch.equal(merged, weight)


def test_a_weight_that_does_not_fit_is_named_with_its_shape_and_the_sum() -> None:
    split = qkv((24, 4), [4, 1, 1])
    with pytest.raises(ConfigurationError) as error:
        check_fits("layers.3.linear_qkv.weight", (18, 4), split, 2, 0)
    message = str(error.value)
    for word in ("layers.3.linear_qkv.weight=(18, 4)", "(12, 4)", "(q 4 | k 1 | v 1) x 4", "24"):
        assert word in message
    with pytest.raises(ConfigurationError, match="tensor="):
        split_parts(torch.zeros(12, 4), split)
    with pytest.raises(ConfigurationError, match="out="):
        merge_parts(split_parts(torch.zeros(24, 4), split), split, torch.zeros(24, 5))
    with pytest.raises(ConfigurationError, match="tensor="):
        split_local(torch.zeros(24, 4), split, 2, 0, 0)
    assert local_shape(split, 2, 0) == (12, 4)
