"""What goes out and comes back is bit-equal, for any pair of layouts."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt.layouts import Layout, Matrix
from tests.unit.layouts.strategies import computed, full_matrix, simulate, store, stored

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=50, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 4), st.booleans())
def test_every_piece_arrives_and_every_replica_gets_the_update(data, shape, ranks, differ):
    storage = data.draw(stored(shape, ranks))
    compute = data.draw(computed(shape, 2 * ranks))
    matrix = Matrix("w", storage, compute)
    full = full_matrix(shape)
    tensors = store(storage, full, 2 * ranks)
    _, pieces, outputs = simulate(matrix, 2 * ranks, tensors, lambda stack: 3 * stack)
    for rank, piece in enumerate(pieces):
        want = store(compute, full, 2 * ranks)[rank]
        if piece is not None:
            assert torch.equal(piece.flatten(), want)
    for output, want in zip(outputs, store(storage, 3 * full, 2 * ranks), strict=True):
        assert torch.equal(output.nan_to_num(7), want.nan_to_num(7))


@settings(max_examples=20, deadline=None)
@given(st.data(), SHAPES, st.integers(1, 4))
def test_only_sources_send_to_a_rank_that_stores_nothing(data, shape, ranks):
    storage = data.draw(stored(shape, ranks))
    owner = 2 * ranks  # a rank without storage
    full = full_matrix(shape)
    tensors = store(storage, full, 2 * ranks + 1, copies_differ=True)
    matrix = Matrix("w", storage, Layout.whole(shape, owner))
    plans, pieces, _ = simulate(matrix, 2 * ranks + 1, tensors, lambda stack: stack)
    assert torch.equal(pieces[owner], full)
    assert sum(sum(plan.waves[0].inward.send_sizes) for plan in plans) == full.numel()
    stored_elements = int(storage.boxes.area.sum())
    assert sum(sum(plan.waves[0].outward.send_sizes) for plan in plans) == stored_elements


def test_what_a_rank_holds_already_does_not_travel():
    shape, full = (6, 4), full_matrix((6, 4))
    replicated = Layout.replicated(shape, [0, 1, 2])
    plans, _, _ = simulate(
        Matrix("w", replicated, Layout.whole(shape, 2)), 3, store(replicated, full, 3), torch.neg
    )
    assert [plan.waves[0].inward.collective for plan in plans] == [False] * 3
    assert plans[2].waves[0].outward.send_sizes == (24, 24, 0)
    slabs = Layout.slabs(shape, 1, [0, 1, 2])
    plans, _, _ = simulate(Matrix("w", slabs, slabs.compact()), 3, store(slabs, full, 3), torch.neg)
    assert {plan.calls for plan in plans} == {0}
    plans, _, _ = simulate(
        Matrix("w", slabs, Layout.replicated(shape, [0, 1, 2])), 3, store(slabs, full, 3), torch.neg
    )
    assert {plan.calls for plan in plans} == {1}  # gathered, then every rank keeps its own


def test_interleaved_rows_are_few_copies():
    """Gate and up rows alternate in the fused weight: one strided copy per rank, not thousands."""
    parent = Layout.slabs((4096, 8), 0, [0, 1])
    gate = parent.select_rows(list(range(0, 4096, 2)), [1] * 2048)
    matrix = Matrix("gate", gate, Layout.whole(gate.shape, 0))
    full = full_matrix(gate.shape)
    plans, pieces, _ = simulate(matrix, 2, store(gate, full, 2), torch.neg)
    assert torch.equal(pieces[0], full)
    assert [len(plan.waves[0].inward.pack) for plan in plans] == [0, 1]
    assert len(plans[0].waves[0].inward.keep) == 1
