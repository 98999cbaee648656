"""Which compute layout a mode means, and what ``auto`` chooses: pure functions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt.layouts import Layout
from megatron_eopt.math import standard_flops
from megatron_eopt.optimizers.modes import ComputePlacement, home, place_matrices

WAVE = 64 << 20


def rows(shape, ranks):
    return Layout.slabs(shape, 0, range(ranks))


def modes(storage, ranks, mode="auto", **options):
    return [work.mode for work in place_matrices(storage, ranks, mode, WAVE, **options)[0]]


def test_auto_gives_many_large_matrices_to_owners():
    storage = [rows((4096, 4096), 4) for _ in range(64)]
    placements, _ = place_matrices(storage, 4, "auto", WAVE)
    assert {matrix.mode for matrix in placements} == {"exchange"}
    owners = [home(matrix.compute)[0] for matrix in placements]
    assert np.bincount(owners).tolist() == [16] * 4


BIG = rows((8192, 2048), 8)
WIDE = Layout.slabs((4096, 16384), 1, range(2))


@pytest.mark.parametrize(
    ("storage", "ranks", "mode", "options", "expected"),
    [
        # fewer matrices than ranks
        ([BIG], 8, "auto", {}, ["distributed"]),
        ([BIG] * 2, 8, "auto", {}, ["distributed"] * 2),
        # one outweighs the others
        ([rows((1024, 512), 2)] * 8 + [WIDE], 2, "auto", {}, ["exchange"] * 8 + ["distributed"]),
        # they cost less than a second collective
        ([rows((32, 32), 2)] * 8, 2, "auto", {}, ["duplicated"] * 8),
        # fewer columns than ranks
        ([rows((8, 4), 16)], 16, "distributed", {}, ["exchange"]),
        # an iteration that ranks cannot share, as Megatron's
        ([BIG], 8, "auto", {"whole_only": True}, ["duplicated"]),
        ([BIG], 8, "distributed", {"whole_only": True}, ["exchange"]),
    ],
)
def test_modes_of_matrices(storage, ranks, mode, options, expected):
    assert modes(storage, ranks, mode, **options) == expected


def test_auto_shares_large_matrices_of_a_rest_that_does_not_come_out_even():
    assert "distributed" in modes([BIG] * 9, 8)
    assert set(modes([BIG] * 9, 8)) <= {"distributed", "exchange"}


def busiest(storage, ranks, mode):
    """Return what the busiest rank has to do in a mode, and how many collectives at most."""
    loads, calls = np.zeros(ranks), set()
    for layout, work in zip(storage, place_matrices(storage, ranks, mode, WAVE)[0], strict=True):
        short, long = sorted(layout.shape)
        match work.mode:
            case "distributed":
                loads += 5 * (4 * long * short**2 / ranks + 2 * short**3)
                calls |= {(layout.shape, step) for step in range(6)}
            case "duplicated":
                loads += standard_flops(*layout.shape)
                calls |= {"in"}
            case "exchange":
                loads[home(work.compute)[0]] += standard_flops(*layout.shape)
                calls |= {"in", "out"}
    return loads.max() + 1e9 * len(calls)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(2, 9),
)
def test_auto_is_never_blockwise_and_never_dearer_than_one_mode_for_all(sizes, ranks):
    storage = [rows((512 * a, 512 * b), ranks) for a, b in sizes]
    first = place_matrices(storage, ranks, "auto", WAVE)
    again = place_matrices(storage, ranks, "auto", WAVE)
    chosen = [work.mode for work in first[0]]
    assert [work.mode for work in again[0]] == chosen
    assert first[1] == again[1]
    assert "blockwise" not in chosen
    cost = busiest(storage, ranks, "auto")
    for other in ("duplicated", "exchange", "distributed"):
        assert cost <= busiest(storage, ranks, other) * (1 + 1e-12)


def test_a_slightly_uneven_cut_stays_and_a_very_uneven_one_is_evened_out():
    slightly, very = (Layout.slabs((96, 32), 0, range(2), s) for s in ([50, 46], [80, 16]))
    placements, waves = place_matrices([slightly, very, slightly], 2, "distributed", WAVE)
    held = [matrix.compute.boxes.held(2).tolist() for matrix in placements]
    assert held == [[1600, 1472], [1536, 1536], [1600, 1472]]
    # a wave's matrices have one local shape on every rank, so all ranks stack them alike
    assert sorted(waves) == [(0, 2), (1,)]


def test_copies_are_no_slabs():
    (work,) = place_matrices([Layout.replicated((96, 32), range(2))], 2, "distributed", WAVE)[0]
    assert work.compute.boxes.held(2).tolist() == [1536, 1536]


def test_short_side_cuts_are_recut_to_the_long_side():
    (matrix,) = place_matrices([rows((32, 96), 4)], 4, "distributed", WAVE)[0]
    assert matrix.compute.local_shape(3) == (32, 24)
    (alone,) = place_matrices([rows((32, 96), 4)], 4, "exchange", WAVE)[0]
    assert sum(alone.load_of(rank, 4) > 0 for rank in range(4)) == 1


def test_slabs_of_different_teams_or_shapes_are_no_batch():
    shapes, teams = ((4, 6), (6, 4)), ((0, 1), (2, 3))
    places = [ComputePlacement("exchange", rows(s, 2), team) for s in shapes for team in teams]
    assert len({place.kind for place in places}) == 4
