"""What each mode sends, counted at torch.distributed's own functions."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.math import choose_algorithm, resolve_coefficients
from megatron_eopt.matrices import qkv, whole
from megatron_eopt.optimizers.exchange import ExchangeConfig, MatrixExchange
from megatron_eopt.storage.shard import Fragment
from tests.harness import run_ranks
from tests.harness.collectives import counted
from tests.harness.shards import StoredParameter, newton_schulz


def run_counted(parameters, mode, precision="highest", wave_bytes=64 << 20, algorithm="auto"):
    """Return the calls of one step, the number of waves, and what the plan says about itself."""
    size, rank = dist.get_world_size(), dist.get_rank()
    built = []
    for number, (split, dim) in enumerate(parameters):
        numel = torch.Size(split.shape).numel() // size
        fragments = tuple(Fragment(part, 0, numel) for part in range(size))
        built.append(StoredParameter(f"w{number}", split, dim, size, fragments))
    shards = [parameter.shard(dist.group.WORLD) for parameter in built]
    engine = MatrixExchange(
        shards,
        newton_schulz(precision=precision, algorithm=algorithm),
        ExchangeConfig(mode=mode, matrix_buffer_mb=wave_bytes / 2**20),
    )
    directions = [
        torch.randn(p.fragments[rank].stop, generator=torch.Generator().manual_seed(i))
        for i, p in enumerate(built)
    ]
    engine.updates(directions)
    with counted() as calls:
        engine.updates(directions)
    plan = engine.redistribution.plan
    return calls, len(plan.waves), plan.calls, plan.bytes_sent


# every rank stores 1/P of each and owns as many as the others
MODEL = [(whole((128, 64)), 0), (whole((64, 128)), 1), (qkv((192, 64), (16, 16, 16)), 0)] * 4


@pytest.mark.parametrize(("size", "wave_bytes"), [(2, 100_000), (4, 64 << 20)])
def test_exchange_takes_two_collectives_a_wave_and_duplicated_one(size, wave_bytes):
    sent = {}
    for mode, per_wave in (("duplicated", 1), ("exchange", 2)):
        ranks = run_ranks(size, run_counted, MODEL, mode, "highest", wave_bytes)
        for calls, waves, planned_calls, planned_bytes in ranks:
            assert [name for name, _, _ in calls] == ["all_to_all_single"] * per_wave * waves
            assert (waves > 1) == (wave_bytes < 64 << 20)
            assert planned_calls == len(calls)
            assert planned_bytes == sum(nbytes for _, nbytes, _ in calls)
        sent[mode] = [sum(nbytes for _, nbytes, _ in calls) for calls, *_ in ranks]
    elements = sum(torch.Size(split.shape).numel() for split, _ in MODEL)
    assert sent["duplicated"] == [4 * elements // size * (size - 1)] * size
    for exchange, duplicated in zip(sent["exchange"], sent["duplicated"], strict=True):
        assert exchange <= 2.1 / size * duplicated


@pytest.mark.parametrize(
    ("shape", "dim", "precision", "dtype"),
    [
        ((512, 128), 0, "highest", torch.float32),
        ((128, 512), 1, "highest", torch.float32),
        ((2048, 256), 0, "medium", torch.float16),
    ],
)
def test_distributed_reduces_a_gram_matrix_per_restart(shape, dim, precision, dtype):
    schedule = resolve_coefficients("quintic", 5)
    plan = choose_algorithm(shape, torch.float32, precision, schedule)
    assert plan.algorithm == "gram"
    calls, *_ = run_ranks(2, run_counted, [(whole(shape), dim)], "distributed", precision)[0]
    norm, *grams = calls
    assert norm[:2] == ("all_reduce", 8)
    count = 1 + len(plan.restarts)
    assert grams == [("all_reduce", dtype.itemsize * min(shape) ** 2, dtype)] * count


def test_square_matrices_reduce_once_a_step_and_one_call_serves_a_stack():
    square = [(whole((64, 64)), 1)] * 6
    for algorithm in ("auto", "standard"):
        job = partial(run_counted, square, "distributed", algorithm=algorithm)
        calls, waves, planned, _ = run_ranks(2, job)[0]
        assert (waves, planned) == (1, 0)
        assert [name for name, _, _ in calls] == ["all_reduce"] * 6
        assert [nbytes for _, nbytes, _ in calls[1:]] == [6 * 4 * 64**2] * 5


def test_a_cut_short_side_is_recut_first_and_counted_apart():
    narrow = [(whole((64, 512)), 0)] * 2
    for calls, _, planned_calls, planned_bytes in run_ranks(2, run_counted, narrow, "distributed"):
        names = ["all_to_all_single", *["all_reduce"] * 3, "all_to_all_single"]
        assert [name for name, _, _ in calls] == names
        assert planned_calls == 2
        # half of what a rank stores is computed on by the other, in both directions
        assert planned_bytes == 2 * 4 * 2 * (32 * 256)
        assert planned_bytes == sum(n for name, n, _ in calls if name == "all_to_all_single")


def test_blockwise_and_one_rank_send_nothing():
    for size, mode in ((1, "auto"), (2, "blockwise")):
        for calls, *_ in run_ranks(size, run_counted, MODEL, mode):
            assert calls == []
