"""Layouts: where elements lie. Plans: digests, and what is loaded when."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts import Layout, Matrix, build_plan
from megatron_eopt.layouts.boxes import Boxes
from megatron_eopt.layouts.plan import places_of
from tests.unit.layouts.strategies import check, computed, full_matrix, store, stored

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=60, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 4))
def test_random_layouts_are_complete_and_a_missing_box_is_noticed(data, shape, ranks):
    layout = data.draw(stored(shape, ranks))
    check(layout, 2 * ranks)
    lost = data.draw(st.sampled_from(np.flatnonzero(layout.boxes.source).tolist()))
    rest = Layout(shape, layout.boxes.take(np.arange(len(layout.boxes)) != lost))
    with pytest.raises(ConfigurationError, match=r"layout='w \(storage\)'.*hold each element"):
        build_plan([Matrix("w", rest, Layout.whole(shape, 0))], [[0]], rank=0, world_size=2 * ranks)


WHOLE = Layout.whole((6, 4), 0)


def moved(row: int = 3, column: int = 0, height: int = 3, width: int = 4) -> Boxes:
    """Return both halves of the rows of a 6 x 4 matrix, the second one at another place."""
    corner, size = ([0, row], [0, column]), ([3, height], [4, width])
    return Boxes.make(rank=[0, 1], corner=corner, size=size, offset=0, stride=4)


@pytest.mark.parametrize(
    "places",
    [
        {"row": 2},  # one row twice, the last one never
        {"row": 0},  # the first half twice
        {"row": 2, "height": 4},  # all, and one row twice
        {"row": 2, "column": 2, "height": 6, "width": 2},  # as many elements as it should have
        {"row": 4},
        {"row": -1},
        {"column": 1},
        {"width": 3},
        {"height": 2},
    ],
)
@pytest.mark.parametrize("which", ["storage", "compute"])
def test_what_covers_a_matrix_in_part_or_twice_is_refused(places, which):
    faulty = Layout((6, 4), moved(**places))
    pair = (faulty, WHOLE) if which == "storage" else (WHOLE, faulty)
    with pytest.raises(ConfigurationError, match=rf"layout='w \({which}\)'.*each element"):
        build_plan([Matrix("w", *pair)], [[0]], rank=0, world_size=2)
    build_plan([Matrix("w", Layout((6, 4), moved()), WHOLE)], [[0]], rank=0, world_size=2)


def test_what_is_outside_of_a_matrix_is_refused_even_if_the_matrix_is_covered():
    below = Boxes.make(rank=0, corner=(6, 0), size=(1, 4), offset=24, stride=4)
    stored = Layout((6, 4), Boxes.join([WHOLE.boxes, below]))
    with pytest.raises(ConfigurationError, match=r"w \(storage\).*must hold each element"):
        build_plan([Matrix("w", stored, WHOLE)], [[0]], rank=0, world_size=1)


def test_a_block_does_not_make_up_for_the_one_across_the_diagonal():
    def quarters(row: int, column: int) -> Matrix:
        corner = ([0, 0, row, 2], [0, 2, column, 2])
        boxes = Boxes.make(rank=[0, 1, 2, 3], corner=corner, size=(2, 2), offset=0, stride=2)
        return Matrix("w", Layout((4, 4), boxes), Layout.whole((4, 4), 0))

    build_plan([quarters(2, 0)], [[0]], rank=0, world_size=4)
    with pytest.raises(ConfigurationError, match=r"layout='w \(storage\)'.*each element"):
        build_plan([quarters(0, 2)], [[0]], rank=0, world_size=4)


@settings(max_examples=60, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 4))
def test_a_box_that_is_a_source_twice_is_noticed_even_if_another_is_missing(data, shape, ranks):
    layout = data.draw(stored(shape, ranks))
    sources = np.flatnonzero(layout.boxes.source).tolist()
    twice = data.draw(st.sampled_from(sources))
    lost = data.draw(st.sampled_from([None, *(box for box in sources if box != twice)]))
    kept = [box for box in range(len(layout.boxes)) if box != lost]
    faulty = Layout(shape, layout.boxes.take(np.array([*kept, twice])))
    matrix = Matrix("w", faulty, Layout.whole(shape, 0))
    with pytest.raises(ConfigurationError, match="hold each element"):
        build_plan([matrix], [[0]], rank=0, world_size=2 * ranks)


@settings(max_examples=40, deadline=None)
@given(st.data(), SHAPES)
def test_fragments_are_slices_of_the_flattened_slab(data, shape):
    slabs = data.draw(computed(shape, 3))
    full = full_matrix(shape)
    whole = store(slabs, full, 3)
    holder = data.draw(st.sampled_from(sorted(set(slabs.boxes.rank.tolist()))))
    bounds = st.integers(0, len(whole[holder]))
    start, stop = sorted((data.draw(bounds), data.draw(bounds)))
    fragment = slabs.fragments(0, holder, start, stop)
    assert fragment.boxes.held(1)[0] == stop - start
    assert len(fragment.boxes) <= 3
    if start < stop:
        assert torch.equal(store(fragment, full, 1)[0], whole[holder][start:stop])


def exchange_over_tp(shape=(8, 6), owner=0, name="w"):
    return Matrix(name, Layout.slabs(shape, 1, [0, 1]), Layout.whole(shape, owner))


def test_digest_notices_every_difference():
    def digest(matrix, waves=((0,),), rank=0, element_size=4):
        plan = build_plan([matrix], waves, rank=rank, world_size=2, element_size=element_size)
        return plan.digest

    base = digest(exchange_over_tp())
    assert base == digest(exchange_over_tp(), rank=1)
    storage, compute = exchange_over_tp().storage, exchange_over_tp().compute
    assert base not in {
        digest(exchange_over_tp(owner=1)),
        digest(exchange_over_tp((8, 8))),
        digest(exchange_over_tp(name="v")),
        digest(Matrix("w", storage, compute, "fused")),
        digest(Matrix("w", Layout.slabs((8, 6), 1, [1, 0]), compute)),
        digest(exchange_over_tp(), element_size=2),
    }


def test_a_tensor_is_loaded_when_any_rank_needs_it():
    def fused(name, owner, rank):
        return Matrix(name, Layout.whole((4, 6), rank), Layout.whole((4, 6), owner), "fused")

    # each rank stores a matrix of it, and computes the other one's
    matrices = [exchange_over_tp(name="a"), fused("q", 1, 0), fused("k", 0, 1)]
    for rank in range(2):
        plan = build_plan(matrices, [[1], [0], [2]], rank=rank, world_size=2)
        assert plan.loads == (("fused",), ("a",), ())
    # what stays on its rank has a place there, but none that other waves use before
    stays = [exchange_over_tp(name="a"), fused("q", 0, 0), fused("k", 1, 1)]
    for rank, has_place in enumerate([True, False]):
        plan = build_plan(stays, [[1], [0], [2]], rank=rank, world_size=2)
        assert ("fused" in places_of(plan)) == has_place
