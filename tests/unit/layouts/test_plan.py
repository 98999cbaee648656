"""Plans: counts, batches, digests, and the size of a large one."""

import numpy as np
import pytest

from megatron_eopt.layouts import Layout, Matrix, build_plan
from megatron_eopt.layouts.plan import places_of


def exchange_over_tp(shape=(8, 6), owner=0, name="w"):
    return Matrix(name, Layout.slabs(shape, 1, [0, 1]), Layout.whole(shape, owner))


def test_batches_are_stacks_of_equal_shapes():
    matrices = [
        exchange_over_tp((8, 6), 0, "a"),
        exchange_over_tp((4, 6), 0, "b"),
        exchange_over_tp((8, 6), 0, "c"),
        exchange_over_tp((8, 6), 1, "d"),
    ]
    plan = build_plan(matrices, [[0, 1, 2, 3]], rank=0, world_size=2)
    first, second = plan.waves[0].batches
    assert (first.shape, first.matrices) == ((8, 6), (0, 2))
    assert (second.shape, second.matrices) == ((4, 6), (1,))
    assert second.offset % 64 == 0
    assert second.offset >= 2 * 48


def test_bytes_of_uneven_pieces_are_those_of_their_boxes():
    shape = (7, 3)
    matrices = [
        # 12, 3 and 6 elements, to rank 1
        Matrix("rows", Layout.slabs(shape, 0, [0, 1, 2], [4, 1, 2]), Layout.whole(shape, 1)),
        # 5, none and 16 of them, to rank 2, where they stay
        Matrix(
            "flat",
            Layout.whole(shape, 0).fragments([0, 1, 2], 0, [0, 5, 5], [5, 5, 21]),
            Layout.whole(shape, 2),
            returns=False,
        ),
        # 7 elements, and 14 that ranks 1 and 2 both have, to rank 0
        Matrix("copies", Layout.slabs(shape, 1, [0, [1, 2]], [1, 2]), Layout.whole(shape, 0)),
    ]
    # from each rank, in each wave, in and out
    sent = {
        0: [(0, 12, 0), (0, 0, 0), (0, 0, 5), (0, 0, 0), (0, 0, 0), (0, 14, 14)],
        1: [(0, 0, 0), (12, 0, 6), (0, 0, 0), (0, 0, 0), (14, 0, 0), (0, 0, 0)],
        2: [(0, 6, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)],
    }
    for rank in range(3):
        plan = build_plan(matrices, [[0], [1], [2]], rank=rank, world_size=3, element_size=2)
        ways = [way for wave in plan.waves for way in (wave.inward, wave.outward)]
        assert [way.send_sizes for way in ways] == sent[rank]
        received = [tuple(sent[other][n][rank] for other in range(3)) for n in range(6)]
        assert [way.recv_sizes for way in ways] == received
        assert plan.calls == 5
        assert plan.bytes_sent == 2 * {0: 45, 1: 32, 2: 6}[rank]
        assert plan.bytes_received == 2 * {0: 26, 1: 32, 2: 25}[rank]


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


def flat_buffer_matrices(count, tp, dp, rows=64, cols=48):
    """A ZeRO-1 buffer of ``count`` matrices, column-cut over ``tp``, cut evenly over ``dp``."""
    local = rows * cols // tp
    edges = np.linspace(0, count * local, dp + 1).astype(np.int64)
    for i in range(count):
        first = int(np.searchsorted(edges, i * local, "right")) - 1
        last = int(np.searchsorted(edges, (i + 1) * local, "left"))
        d = np.tile(np.arange(first, last), tp)
        t = np.repeat(np.arange(tp), last - first)
        start = np.clip(edges[d] - i * local, 0, local)
        stop = np.clip(edges[d + 1] - i * local, 0, local)
        slabs = Layout.slabs((rows, cols), 1, list(range(tp)))
        yield Matrix(
            str(i), slabs.fragments(d * tp + t, t, start, stop), Layout.whole((rows, cols), i % dp)
        )


def test_a_plan_for_4096_ranks_shares_evenly():
    matrices = list(flat_buffer_matrices(500, 8, 512))
    plan = build_plan(matrices, [list(range(500))], rank=77, world_size=4096)
    stored = sum(sum(w.inward.send_sizes) for w in plan.waves)
    assert stored == pytest.approx(500 * 64 * 48 / 4096, abs=1)
    assert plan.calls == 2
