"""Plans: digests, and what is loaded when."""

import pytest

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts import Layout, Matrix, build_plan
from megatron_eopt.layouts.boxes import Boxes
from megatron_eopt.layouts.plan import places_of


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


def test_what_is_outside_of_a_matrix_is_refused_even_if_the_matrix_is_covered():
    whole = Layout.whole((4, 6), 0)
    below = Boxes.make(rank=0, corner=(4, 0), size=(1, 6), offset=24, stride=6)
    stored = Layout((4, 6), Boxes.join([whole.boxes, below]))
    with pytest.raises(ConfigurationError, match=r"w \(storage\).*must hold each element"):
        build_plan([Matrix("w", stored, whole)], [[0]], rank=0, world_size=1)
