"""The engine on its own: any storage, any mode, and what it refuses."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.math import orthogonalize
from megatron_eopt.matrices import gated, qkv, whole
from megatron_eopt.optimizers.engine import MatrixEngine, Means
from megatron_eopt.storage.replicated import tensor_parallel_cut
from megatron_eopt.storage.shard import Fragment
from tests.harness import run_ranks
from tests.harness.shards import StoredParameter

EXACT = ("duplicated", "exchange", "distributed", "auto")


def identity(stack, matrices, reduce, shape):
    """Touch everything without changing it."""
    stack.mul_(1.0)


def newton_schulz(stack, matrices, reduce, shape):
    whole_shape = None if reduce is None else shape
    stack.copy_(orthogonalize(stack, reduce=reduce, whole_shape=whole_shape))


@st.composite
def stored_parameters(draw, ranks):
    """Random parameters: fused or not, cut by tensor parallelism, then by flat fragments."""
    parameters = []
    for number in range(draw(st.integers(1, 4))):
        tp = draw(st.sampled_from([1, 2]))
        split, dim = draw(
            st.sampled_from(
                [
                    (whole((8, 6)), 0),
                    (whole((6, 8)), 1),
                    (whole((6, 6)), 1),
                    (qkv((16, 4), (4, 2, 2)), 0),
                    (gated((8, 6)), 0),
                    (gated((2, 8, 6)), 0),
                ]
            )
        )
        numel = torch.Size(split.shape).numel() // tp
        per = ranks // tp
        fragments = []
        for coordinate in range(tp):
            if draw(st.booleans()):  # replicas
                fragments += [Fragment(coordinate, 0, numel)] * per
                continue
            cuts = draw(st.lists(st.integers(0, numel), min_size=per - 1, max_size=per - 1))
            bounds = [0, *sorted(cuts), numel]
            fragments += [Fragment(coordinate, bounds[i], bounds[i + 1]) for i in range(per)]
        dim = dim if tp > 1 else -1
        parameters.append(StoredParameter(f"w{number}", split, dim, tp, tuple(fragments)))
    return parameters


WAYS = list(itertools.product(EXACT, [300, 1 << 20]))
"""Modes with several waves and with one."""


def collect_cases(ranks, count):
    """Let hypothesis draw here; the workers get all cases in one job."""
    cases = []

    @settings(max_examples=count, deadline=None, database=None)
    @given(stored_parameters(ranks))
    def draw(parameters):
        mode, wave_bytes = WAYS[len(cases) % len(WAYS)]
        cases.append((parameters, mode, wave_bytes))

    draw()
    return cases


def come_back(cases):
    """Return the cases in which something other than the input came back."""
    rank, wrong = dist.get_rank(), []
    for number, (parameters, mode, wave_bytes) in enumerate(cases):
        shards = [parameter.shard(dist.group.WORLD) for parameter in parameters]
        engine = MatrixEngine(shards, identity, Means(mode=mode, wave_mb=wave_bytes / 2**20))
        directions = []
        for index, parameter in enumerate(parameters):
            fragment = parameter.fragments[rank]
            # every rank with the same coordinate has the same slab
            generator = torch.Generator().manual_seed(1000 * index + fragment.tensor_rank)
            slab = torch.randn(parameter.numel, generator=generator)
            directions.append(slab[fragment.start : fragment.stop].clone())
        before = [direction.clone() for direction in directions]
        for update, direction, old in zip(
            engine.updates(directions), directions, before, strict=True
        ):
            if not (torch.equal(update, old) and torch.equal(direction, old)):
                wrong.append((number, mode, parameters))
    return wrong


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_what_goes_out_comes_back_bit_equal(ranks):
    cases = collect_cases(ranks, 32)
    assert len(cases) >= 24
    assert run_ranks(ranks, come_back, cases) == [[]] * ranks


UNEVEN = {
    "rows": (whole((96, 40)), [(0, 50 * 40), (50 * 40, 96 * 40)]),
    "very uneven rows": (whole((96, 40)), [(0, 90 * 40), (90 * 40, 96 * 40)]),
    "inside a row": (whole((40, 96)), [(0, 1001), (1001, 3840)]),
    "all on one": (whole((48, 48)), [(0, 0), (0, 2304)]),
    "fused, inside a row": (qkv((96, 40), (32, 8, 8)), [(0, 1999), (1999, 3840)]),
}


def uneven_errors(batched):
    rank = dist.get_rank()
    stored = [
        StoredParameter(name, split, -1, 1, tuple(Fragment(0, *bounds) for bounds in ranges))
        for name, (split, ranges) in UNEVEN.items()
    ]
    alone = [
        StoredParameter(p.name, p.split, -1, 1, (Fragment(0, 0, p.numel),)).shard() for p in stored
    ]
    generator = torch.Generator().manual_seed(0)
    full = [torch.randn(p.split.shape, generator=generator) for p in stored]
    wants = MatrixEngine(alone, newton_schulz, Means(batched=batched)).updates(full)
    shards = [p.shard(dist.group.WORLD) for p in stored]
    result = {}
    for mode in EXACT:
        engine = MatrixEngine(shards, newton_schulz, Means(mode=mode, batched=batched))
        ranges = [slice(p.fragments[rank].start, p.fragments[rank].stop) for p in stored]
        mine = [x.flatten()[r] for x, r in zip(full, ranges, strict=True)]
        for p, got, want, r in zip(stored, engine.updates(mine), wants, ranges, strict=True):
            piece = want.flatten()[r]
            error = float((got - piece).norm() / want.norm()) if piece.numel() else 0.0
            result[mode, p.name] = (error, torch.equal(got, piece))
    return result


@pytest.mark.parametrize("batched", [True, False])
def test_uneven_shards(batched):
    for result in run_ranks(2, uneven_errors, batched):
        for (mode, name), (error, equal) in result.items():
            # float32 rounding of sums in another order; see test_tp_modes
            assert error < 2e-6, (mode, name)
            if not batched and mode in ("duplicated", "exchange"):
                assert equal, (mode, name)


def blockwise(shape):
    rank = dist.get_rank()
    fragments = tuple(Fragment(r, 0, 16 * 24) for r in range(2))
    stored = StoredParameter("w", whole((32, 24)), 0, 2, fragments).shard(dist.group.WORLD)
    shapes = []

    def update(stack, matrices, reduce, shape):
        shapes.append((tuple(stack.shape), shape, reduce))
        newton_schulz(stack, matrices, reduce, shape)

    engine = MatrixEngine([stored], update, Means(mode="blockwise"))
    piece = torch.randn(16, 24, generator=torch.Generator().manual_seed(rank))
    (got,) = engine.updates([piece])
    want = piece.unsqueeze(0).clone()
    newton_schulz(want, (0,), None, (16, 24))
    return shapes, torch.equal(got, want[0]), engine.redistribution.plan.calls


def test_blockwise_computes_each_piece_by_itself_with_its_own_shape():
    for shapes, equal, calls in run_ranks(2, blockwise, None):
        assert shapes == [((1, 16, 24), (16, 24), None)]
        assert equal
        assert calls == 0


def parameter(**attributes):
    param = torch.nn.Parameter(torch.zeros(4, 4))
    for name, value in attributes.items():
        setattr(param, name, value)
    return param


def cuts():
    """Return the cut of each parameter, which nobody has without a group."""
    cut = parameter(partition_dim=0, tensor_model_parallel=True)
    with pytest.raises(ConfigurationError, match="pg_collection"):
        tensor_parallel_cut(cut, None, "auto")
    assert tensor_parallel_cut(cut, None, "blockwise") == (-1, None)
    groups = [dist.new_group([0]), dist.new_group([1])]
    alone = groups[dist.get_rank()]
    both = dist.group.WORLD
    collection = SimpleNamespace(tp=both, expt_tp=alone, gtp_remat=alone, expt_gtp_remat=both)
    result = {}
    for name, param in {
        "dense": parameter(partition_dim=1),
        "expert": parameter(partition_dim=1, allreduce=False),
        "not cut": parameter(partition_dim=-1),
        "Transformer Engine's duplicate": parameter(partition_dim=0, tensor_model_parallel=False),
        "rematerialized over one rank": parameter(partition_dim=0, is_gtp_weight_remat=True),
    }.items():
        dim, group = tensor_parallel_cut(param, collection, "auto")
        result[name] = (dim, group is both)
    with pytest.raises(ConfigurationError, match="is_gtp_weight_remat"):
        tensor_parallel_cut(
            parameter(is_gtp_weight_remat=True, allreduce=False), collection, "auto"
        )
    return result


def test_which_group_cuts_a_parameter():
    assert run_ranks(2, cuts)[0] == {
        "dense": (1, True),
        "expert": (-1, False),
        "not cut": (-1, False),
        "Transformer Engine's duplicate": (-1, False),
        "rematerialized over one rank": (0, True),
    }
