"""What goes out and comes back is bit-equal, for any pair of layouts and over real processes."""

import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.layouts import Layout, Matrix, Redistribution, assign_owners, plan_waves
from megatron_eopt.layouts.boxes import Boxes
from megatron_eopt.layouts.redistribution import _check_agreement
from megatron_eopt.math import standard_flops
from tests.harness.collectives import counted
from tests.harness.each_rank import on_ranks
from tests.unit.layouts.strategies import computed, full_matrix, simulate, store, stored

SHAPES = [(12, 8), (12, 8), (4, 8), (4, 8), (8, 12), (8, 12), (12, 8), (6, 7), (7, 6), (12, 8)]


def tp_layout(index, shape, ranks):
    """Rows and columns in turn, uneven where the size does not divide."""
    return Layout.slabs(shape, index % 2, list(range(ranks)))


def zero_layout(index, shape, ranks):
    """Flat fragments of uneven size; some ranks hold nothing of some matrices."""
    total = shape[0] * shape[1]
    cuts = [0, *(min(total, (k + 1) * total // ranks + 5 * (index % 3)) for k in range(ranks))]
    cuts[-1] = total
    return Layout.whole(shape, 0).fragments(list(range(ranks)), 0, cuts[:-1], cuts[1:])


def tp_zero_layout(index, shape, ranks):
    """Two slabs, each cut flat over the other half of the ranks."""
    slabs = tp_layout(index, shape, 2)
    half = ranks // 2
    table = []
    for slab in range(2):
        extent = int(slabs.boxes.held(2)[slab])
        for k in range(half):
            table.append((2 * k + slab, slab, k * extent // half, (k + 1) * extent // half))
    rank, holder, start, stop = (list(column) for column in zip(*table, strict=True))
    return slabs.fragments(rank, holder, start, stop)


def replicated_layout(index, shape, ranks):
    return Layout.replicated(shape, list(range(ranks)))


STORAGES = [tp_layout, zero_layout, tp_zero_layout, replicated_layout]


def matrices_of(storage, ranks):
    """Return matrices, their owners and three waves or more."""
    costs = [standard_flops(*shape) for shape in SHAPES]
    owners = assign_owners(costs, ranks)
    matrices = [
        Matrix(f"w{i}", storage(i, shape, ranks), Layout.whole(shape, int(owners[i])))
        for i, shape in enumerate(SHAPES)
    ]
    sizes = [4 * a * b for a, b in SHAPES]
    return matrices, owners, plan_waves(owners, costs, sizes, max_bytes=1 << 20, at_least=3)


def double_and_record(seen):
    def compute(batch):
        assert batch.tensor.is_contiguous()
        for index, matrix in zip(batch.matrices, batch.tensor, strict=True):
            seen[index] = matrix.clone()
        batch.tensor.mul_(2)

    return compute


def run(engine, inputs, compute):
    """Run all waves on tensors that are all there, and return what came back."""
    results = {}
    engine.run(lambda wave, names: {name: inputs[name] for name in names}, compute, results.update)
    return results


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks("ranks")
def test_whole_matrices_arrive_and_updates_return(ranks):
    rank = dist.get_rank()
    for storage in STORAGES:
        matrices, owners, waves = matrices_of(storage, ranks)
        engine = Redistribution(matrices, waves, dist.group.WORLD)
        for step in range(3):
            full = [full_matrix(shape, 10 * step + i) for i, shape in enumerate(SHAPES)]
            stored = [store(m.storage, f, ranks)[rank] for m, f in zip(matrices, full, strict=True)]
            inputs = {m.name: tensor for m, tensor in zip(matrices, stored, strict=True)}
            seen = {}
            with counted() as calls:
                outputs = run(engine, inputs, double_and_record(seen))
            assert sorted(seen) == [i for i, owner in enumerate(owners) if owner == rank]
            assert all(torch.equal(seen[i], full[i]) for i in seen)
            for matrix, tensor in zip(matrices, stored, strict=True):
                if tensor.numel():
                    assert torch.equal(outputs[matrix.name], 2 * tensor)
            per_wave = 1 if storage is replicated_layout else 2
            assert len(calls) == engine.plan.calls == per_wave * len(waves)
            assert sum(nbytes for _, nbytes, _ in calls) == engine.plan.bytes_sent
            if not step:
                held = [tensor.data_ptr() for tensor in engine.buffers.values()]
        after = [tensor.data_ptr() for tensor in engine.buffers.values()]
        assert after == held, "buffers live over steps"


@on_ranks(1)
def test_a_rank_without_matrices_computes_and_sends_nothing():
    Redistribution([], [], dist.group.WORLD).run(dict, pytest.fail, pytest.fail)


def test_rows_of_several_widths_are_no_matrix_to_compute_in_place():
    boxes = Boxes.make(rank=0, corner=([0, 2], [0, 1]), size=(2, [4, 3]), offset=[0, 8], stride=4)
    with pytest.raises(ConfigurationError, match="same columns of all its rows"):
        Layout((4, 4), boxes).compact()


@on_ranks(2)
def test_what_travels_may_have_another_dtype_than_what_is_stored():
    rank = dist.get_rank()
    matrix = Matrix("w", Layout.slabs((4, 4), 0, [0, 1]), Layout.whole((4, 4), 1))
    engine = Redistribution([matrix], [[0]], dist.group.WORLD, dtype=torch.bfloat16)
    full = full_matrix((4, 4))
    rounded = full.bfloat16()
    assert engine.plan.bytes_sent == 2 * 8
    for kind in (torch.float32, torch.bfloat16):
        seen = {}
        shard = full[2 * rank : 2 * rank + 2].to(kind)
        result = run(engine, {"w": shard}, double_and_record(seen))["w"]
        if rank == 1:
            assert seen[0].dtype == torch.bfloat16
            assert torch.equal(seen[0], rounded)
        assert result.dtype == kind
        assert torch.equal(result, 2 * rounded[2 * rank : 2 * rank + 2].to(kind))


@pytest.mark.parametrize("odd_one_out", [None, 1])
@on_ranks(2)
def test_waves_take_turns_with_two_stacks(odd_one_out):
    rank, count = dist.get_rank(), 5
    shapes = [(2 + number, 3) for number in range(count)]
    matrices = [
        Matrix(f"{owner}.{number}", Layout.whole(shape, owner), Layout.whole(shape, owner))
        for number, shape in enumerate(shapes)
        for owner in range(2)
    ]
    waves = [[2 * number, 2 * number + 1] for number in range(count)]
    engine = Redistribution(matrices, waves, dist.group.WORLD)
    names = [f"{rank}.{number}" for number in range(count)]
    for step in range(2):
        full = {name: full_matrix(shape, step) for name, shape in zip(names, shapes, strict=True)}
        events, results = [], {}

        def load(wave, asked, full=full, events=events):
            assert list(asked) == [names[wave]]
            events.append(f"load {wave}")
            value = full[names[wave]]
            # a wave's place is not the next one's
            place = engine.place(names[wave]).view_as(value)
            return {names[wave]: value.clone() if wave == odd_one_out else place.copy_(value)}

        def store(found, results=results, events=events):
            results.update({name: tensor.clone() for name, tensor in found.items()})
            events.extend(f"store {name[-1]}" for name in found)

        engine.run(load, double_and_record({}), store)
        assert all(torch.equal(results[name], 2 * full[name]) for name in names)
        assert engine.place(f"{1 - rank}.0") is None
        # before a third wave overwrites them, unless they lie elsewhere
        for wave in range(count - 2):
            if wave != odd_one_out:
                assert events.index(f"store {wave}") < events.index(f"load {wave + 2}")


def test_a_step_after_one_that_failed_takes_nothing_from_it():
    engine = Redistribution([Matrix("w", Layout.whole((2, 2), 0), Layout.whole((2, 2), 0))], [[0]])

    def fail(batch):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        engine.run(lambda *_: {"w": engine.place("w").view(2, 2).zero_()}, fail, {}.update)
    results = {}
    ones = torch.ones(2, 2)
    engine.run(lambda *_: {"w": ones}, double_and_record({}), results.update)
    assert torch.equal(results["w"], 2 * ones)


def test_what_a_tensor_has_after_its_matrices_gets_zeros():
    """The last rows of a rank may be padding, which no update may change."""
    matrix = Matrix("w", Layout.whole((3, 2), 0), Layout.whole((3, 2), 0))
    torch.use_deterministic_algorithms(True)  # new memory is full of nan
    try:
        engine = Redistribution([matrix], [[0]])
        result = run(engine, {"w": torch.ones(4, 2)}, double_and_record({}))["w"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert result.tolist() == [[2, 2], [2, 2], [2, 2], [0, 0]]


@on_ranks(4)
def test_ranks_that_disagree_are_named():
    # rank 1 of 4 believes in another owner
    owner = 2 if dist.get_rank() == 1 else 0
    matrix = Matrix("w", Layout.slabs((6, 4), 0, [0, 1, 2, 3]), Layout.whole((6, 4), owner))
    with pytest.raises(ConfigurationError, match=r"matrices='dense'.*group rank \[1\]"):
        Redistribution([matrix], [[0]], dist.group.WORLD, name="dense")


@pytest.mark.parametrize(
    ("digests", "odd"),
    [("aa", ""), ("ab", "[1]"), ("aba", "[1]"), ("baa", "[0]"), ("abca", "[1, 2]"), ("a", "")],
)
def test_the_ranks_with_another_plan_than_most_are_named(monkeypatch, digests, odd):
    monkeypatch.setattr(dist, "get_world_size", lambda _: len(digests))
    asked = []

    def gather(digest, group):
        asked.append(digest)
        return [*digests]

    monkeypatch.setattr("megatron_eopt.layouts.redistribution.gather_objects", gather)
    group = object()
    if odd:
        with pytest.raises(ConfigurationError, match=f"group rank {re.escape(odd)} has another"):
            _check_agreement(group, "a", "w")
    else:
        _check_agreement(group, "a", "w")
    assert asked == (["a"] if len(digests) > 1 else [])
    _check_agreement(None, "a", "w")
    assert len(asked) == (len(digests) > 1)


SIDES = st.tuples(st.integers(1, 9), st.integers(1, 9))


@settings(max_examples=50, deadline=None)
@given(st.data(), SIDES, st.integers(1, 4), st.booleans())
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
@given(st.data(), SIDES, st.integers(1, 4))
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

    def plans_of(storage, compute):
        return simulate(Matrix("w", storage, compute), 3, store(storage, full, 3), torch.neg)[0]

    replicated, slabs = Layout.replicated(shape, [0, 1, 2]), Layout.slabs(shape, 1, [0, 1, 2])
    plans = plans_of(replicated, Layout.whole(shape, 2))
    assert [plan.waves[0].inward.collective for plan in plans] == [False] * 3
    assert plans[2].waves[0].outward.send_sizes == (24, 24, 0)
    assert {plan.calls for plan in plans_of(slabs, slabs.compact())} == {0}
    # gathered, then every rank keeps its own
    assert {plan.calls for plan in plans_of(slabs, replicated)} == {1}


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
