"""Layouts: where elements lie."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts import Layout, Matrix, build_plan
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
