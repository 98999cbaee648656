"""Layouts: where elements lie, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts import Layout
from megatron_eopt.layouts.boxes import STRIDE, Boxes
from tests.unit.layouts.strategies import check, computed, full_matrix, store, stored

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=100, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 4))
def test_random_layouts_are_complete_and_a_missing_box_is_noticed(data, shape, ranks):
    layout = data.draw(stored(shape, ranks))
    check(layout, "w", 2 * ranks)
    assert layout.held(2 * ranks).sum() >= shape[0] * shape[1]
    sources = np.flatnonzero(layout.boxes.source)
    lost = data.draw(st.sampled_from(sources.tolist()))
    rest = Layout(shape, layout.boxes.take(np.arange(len(layout.boxes)) != lost))
    with pytest.raises(ConfigurationError, match=r"layout of='w'.*have no source"):
        check(rest, "w", 2 * ranks)


@settings(max_examples=50, deadline=None)
@given(st.data(), SHAPES)
def test_fragments_are_slices_of_the_flattened_slab(data, shape):
    slabs = data.draw(computed(shape, 3))
    full = full_matrix(shape)
    whole = store(slabs, full, 3)
    holder = data.draw(st.sampled_from(sorted(set(slabs.boxes.rank.tolist()))))
    bounds = st.integers(0, len(whole[holder]))
    start, stop = sorted((data.draw(bounds), data.draw(bounds)))
    fragment = slabs.fragments(0, holder, start, stop)
    assert fragment.held(1)[0] == stop - start
    assert len(fragment.boxes) <= 3
    if start < stop:
        assert torch.equal(store(fragment, full, 1)[0], whole[holder][start:stop])


def test_fused_rows():
    # one group: two rows of Q, one of K, one of V; two groups; two ranks with one group each
    parent = Layout.slabs((8, 3), 0, [0, 1])
    q = parent.select_rows([0, 4], [2, 2])
    k = parent.select_rows([2, 6], [1, 1])
    assert q.shape == (4, 3)
    assert k.shape == (2, 3)
    full = full_matrix((8, 3))
    assert torch.equal(store(q, full[[0, 1, 4, 5]], 2)[1], full[4:6].flatten())
    assert store(k, full[[2, 6]], 2)[1][-3:].tolist() == full[6].tolist()
    same = Layout.row_runs((4, 3), rank=[0, 1], local=0, logical=[0, 2], length=2)
    assert same.boxes.table.tolist() == q.boxes.table.tolist()


def test_compact_stores_each_piece_by_itself():
    k = Layout.slabs((8, 3), 0, [0, 1]).select_rows([2, 6], [1, 1])
    with pytest.raises(ConfigurationError, match="dense local matrix"):
        k.local_shape(0)
    assert k.compact().local_shape(0) == (1, 3)
    assert k.compact().local_shape(5) is None
    fragment = Layout.whole((4, 4), 0).fragments([0, 1], 0, [0, 6], [6, 16])
    with pytest.raises(ConfigurationError, match="same columns"):
        fragment.compact()


def box(rank, row, column, height, width, source=1):
    return Boxes.make(
        rank=rank,
        corner=(row, column),
        size=(height, width),
        offset=0,
        stride=width,
        source=source,
    )


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([box(0, 0, 0, 2, 4), box(1, 3, 0, 1, 4)], "rows and columns 2:3, 0:4 of"),
        ([box(0, 0, 0, 4, 1), box(1, 0, 2, 4, 2)], "rows and columns 0:4, 1:2 of"),
        ([box(0, 0, 0, 3, 4), box(1, 2, 0, 2, 4)], "rows 2:4, .* on rank 1 .*is rank 0"),
        ([box(0, 0, 0, 4, 4), box(0, 3, 3, 1, 1, 0)], "stored twice by the same rank"),
        ([box(0, 0, 0, 5, 4)], "rows 0:5, columns 0:4 on rank 0 .* inside the matrix"),
        ([box(2, 0, 0, 4, 4)], "on rank 2 .* below 2"),
        ([box(0, 0, 0, 4, 4, 0)], "0:4, 0:4 of .* no source"),
        ([box(0, 0, 0, 4, 4).replace(STRIDE, 3)], "do not overlap"),
    ],
)
def test_bad_layouts_are_refused_with_the_place(boxes, message):
    with pytest.raises(ConfigurationError, match=message):
        check(Layout((4, 4), Boxes.join(boxes)), "w", 2)


def test_other_sources_and_numbers():
    layout = Layout.replicated((2, 2), [0, 1]).with_sources([1])
    check(layout, "w", 2)
    assert layout.piece(1).source.tolist() == [1]
    with pytest.raises(ConfigurationError, match="one source and has two"):
        check(layout.with_sources([0, 1]), "w", 2)
    with pytest.raises(ConfigurationError, match="with the sum 4"):
        Layout.slabs((4, 4), 0, [0, 1], [1, 2])
