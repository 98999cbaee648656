"""Ranks that share matrices where there are more of them than work."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_eopt.layouts import assign_owners
from megatron_eopt.math import orthogonalize, standard_flops
from megatron_eopt.matrices import whole
from megatron_eopt.optimizers import teams
from megatron_eopt.optimizers.exchange import ExchangeConfig, MatrixExchange
from megatron_eopt.optimizers.teams import assign_teams
from megatron_eopt.storage.shard import Fragment
from megatron_eopt.tools.dry_run import Counts
from tests.harness import run_ranks
from tests.harness.model_shapes import MODELS
from tests.harness.shards import StoredParameter, newton_schulz
from tests.unit.math.spectra import gaussian
from tests.unit.storage.full_state import Case, build, steps
from tests.unit.storage.runs import DENSE, Result, deviation, weights

BF16 = 2  # bytes of an element


def busiest(shapes, world_size, found):
    loads = np.zeros(world_size)
    for shape, team in zip(shapes, found, strict=True):
        loads[list(team)] += standard_flops(*shape) / len(team)
    return loads.max()


def alone(shapes, world_size):
    costs = np.array([standard_flops(*shape) for shape in shapes])
    return np.bincount(assign_owners(costs, world_size), weights=costs).max()


@pytest.mark.parametrize(("world_size", "times"), [(256, 2), (512, 4), (1024, 8)])
def test_the_busiest_rank_of_many_has_so_many_times_less_to_do(world_size, times):
    shapes = MODELS["Llama-3-8B"]
    found = assign_teams(shapes, world_size, 8, BF16, np.arange(len(shapes)))
    assert alone(shapes, world_size) / busiest(shapes, world_size, found) == pytest.approx(times)
    for team in found:
        first = team[0]
        assert team == tuple(range(first, first + len(team)))
        assert first % len(team) == 0


@pytest.mark.parametrize("world_size", [8, 128])
def test_where_work_is_enough_matrices_stay_whole(world_size):
    shapes = MODELS["Llama-3-8B"]
    for its in (shapes, []):
        assert assign_teams(its, world_size, 8, BF16, np.arange(len(its))) is None


@contextmanager
def free_talk() -> Iterator[None]:
    """Let teams cost nothing but their arithmetic."""
    with mock.patch.multiple(teams, COLLECTIVE=0.0, BYTE=0.0):
        yield


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9),
    st.integers(2, 19),
    st.integers(1, 16),
)
def test_a_team_never_makes_the_busiest_rank_busier(sizes, world_size, largest):
    shapes = [(7 * a, 6 * b) for a, b in sizes]
    with free_talk():
        found = assign_teams(shapes, world_size, largest, 4, np.arange(len(shapes)) % world_size)
    if found is not None:
        assert busiest(shapes, world_size, found) < alone(shapes, world_size)
        assert max(map(len, found)) <= min(largest, world_size)
        # all its slabs have one size
        pairs = zip(shapes, found, strict=True)
        assert not any(side % len(team) for shape, team in pairs for side in shape)


SHAPES = [(96, 32), (32, 64), (64, 64), (16, 16), (40, 24)]


def shards_of(shapes):
    size = dist.get_world_size()
    for number, shape in enumerate(shapes):
        numel = shape[0] * shape[1]
        # of any length, so that rows are cut inside
        cuts = [numel * rank // size for rank in range(size + 1)]
        ranges = tuple(Fragment(0, *pair) for pair in pairwise(cuts))
        yield StoredParameter(f"w{number}", whole(shape), -1, 1, ranges)


def matrices(shapes):
    return [gaussian(*shape, number) for number, shape in enumerate(shapes)]


def share(algorithm, matrix_buffer_mb, precision):
    """Return this rank's fragments of the updates, FLOPs, sizes of teams, and planned FLOPs."""
    stored = list(shards_of(SHAPES))
    with free_talk():
        shards = [item.shard(dist.group.WORLD) for item in stored]
        engine = MatrixExchange(
            shards,
            newton_schulz(algorithm=algorithm, precision=precision),
            ExchangeConfig("exchange", max_ranks_per_matrix=4, matrix_buffer_mb=matrix_buffer_mb),
        )
    rank = dist.get_rank()
    directions = [
        matrix.flatten()[item.fragments[rank].start : item.fragments[rank].stop]
        for matrix, item in zip(matrices(SHAPES), stored, strict=True)
    ]
    engine.updates(directions)
    with Counts() as counts:
        updates = engine.updates(directions)
    sizes = [len(item.group) for item in engine.placements]
    return updates, counts.flops, sizes, engine.schedule.loads[rank]


@pytest.mark.parametrize(
    ("algorithm", "matrix_buffer_mb", "precision", "tolerance"),
    [
        # rounding of products in another order, in float32 and in 16 bits
        ("standard", 64.0, "highest", 2e-6),
        ("gram", 0.01, "highest", 2e-6),
        ("standard", 64.0, "medium", 2e-2),
        ("gram", 64.0, "medium", 2e-2),
    ],
)
def test_shared_matrices_have_the_update_of_one_process(
    algorithm, matrix_buffer_mb, precision, tolerance
):
    ranks = run_ranks(4, share, algorithm, matrix_buffer_mb, precision)
    assert max(ranks[0][2]) > 1
    # the planned operations are those done
    if algorithm == "standard":
        assert all(flops == load for _, flops, _, load in ranks)
    for number, matrix in enumerate(matrices(SHAPES)):
        found = torch.cat([updates[number].flatten() for updates, *_ in ranks]).view_as(matrix)
        expected = orthogonalize(matrix.double(), algorithm="standard")
        assert (found - expected).norm() / expected.norm() < tolerance


def train(case, count):
    with free_talk():
        chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, count)
    rules = (rule for link in optimizer.chained_optimizers for rule in link.update_rules)
    (schedule,) = (schedule for rule in rules for schedule in rule.schedules)
    sizes = Counter(len(item.group) for item in schedule.placements)
    return Result(weights(case.run, chunk), []), sizes


def test_training_with_teams_is_training_of_one_process():
    config = {"muon_max_ranks_per_matrix": 4, "muon_fp32_matmul_prec": "highest"}
    case = Case("muon", DENSE | {"layers": 1, "hidden": 64, "gated": False}, config=config)
    (reference, none), *_ = run_ranks(1, train, case, 3)
    assert set(none) == {0}
    ranks = run_ranks(4, train, case, 3)
    assert set(ranks[0][1]) - {0}
    # as for all other layouts
    assert deviation([result for result, _ in ranks], reference) < 2e-6
    off = replace(case, config={"muon_max_ranks_per_matrix": 1})
    assert set(run_ranks(4, train, off, 1)[0][1]) == {0}
