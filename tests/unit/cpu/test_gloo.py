"""The collectives that gloo lacks equal what NCCL's would give."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.cpu.gloo import group_patches
from tests.harness import RankError, run_ranks


def _uneven_all_gather(async_op: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = [3, 0, 5, 1][:size]
    own = torch.arange(lengths[rank], dtype=torch.bfloat16) + 10 * rank
    gathered = [torch.full((length,), -1, dtype=torch.bfloat16) for length in lengths]
    gathered[rank] = own  # as megatron-core does
    work = dist.all_gather(gathered, own, async_op=async_op)
    assert (work is not None) == async_op
    if work is not None:
        work.wait()
        assert work.is_completed()
    for other, length in enumerate(lengths):
        assert gathered[other].tolist() == [10 * other + i for i in range(length)]


def _uneven_all_gather_in_a_group() -> None:
    group: Any = dist.new_group([1, 2])
    rank = dist.get_rank()
    gathered = [torch.zeros(2), torch.zeros(3)]
    if rank in (1, 2):
        dist.all_gather(gathered, torch.full((rank + 1,), float(rank)), group=group)
        assert [entry.tolist() for entry in gathered] == [[1, 1], [2, 2, 2]]


def _all_to_all_with_tensor_sizes() -> None:
    rank = dist.get_rank()
    sent = torch.tensor([[1, 2], [3, 1]])
    given = torch.arange(int(sent[rank].sum())) + 10 * rank
    received = torch.empty(int(sent[:, rank].sum()), dtype=torch.int64)
    sizes: Any = sent[:, rank], sent[rank]
    dist.all_to_all_single(received, given, *sizes)
    assert received.tolist() == ([0, 10, 11, 12] if rank == 0 else [1, 2, 13])


def _uneven_reduce_scatter() -> None:
    rank = dist.get_rank()
    lengths = [3, 0, 5, 1]
    given = [torch.arange(length) * 1.0 + 10 * rank for length in lengths]
    reduced = torch.empty(lengths[rank])
    dist.reduce_scatter(reduced, given)
    assert reduced.tolist() == [4 * i + 60 for i in range(lengths[rank])]


def test_uneven_reduce_scatter() -> None:
    """What experts send back under tensor parallelism; gloo has it."""
    run_ranks(4, _uneven_reduce_scatter)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_uneven_all_gather(ranks: int, async_op: bool) -> None:
    run_ranks(ranks, _uneven_all_gather, async_op)


def test_uneven_all_gather_in_a_group() -> None:
    run_ranks(4, _uneven_all_gather_in_a_group)


def test_all_to_all_with_tensor_sizes() -> None:
    run_ranks(2, _all_to_all_with_tensor_sizes)


def test_gloo_alone_cannot_do_it() -> None:
    with pytest.raises(RankError):
        run_ranks(2, _uneven_all_gather, False, cpu=False)


def _threads_of_groups() -> tuple[int, int, float]:
    groups: list[Any] = [dist.new_group([0, 1]) for _ in range(10)]
    total = torch.ones(3)
    for group in groups:
        dist.all_reduce(total, group=group)
    tasks = Path("/proc/self/task").iterdir()
    names = [(task / "comm").read_text().strip() for task in tasks]
    return names.count("gloo_tcp_loop"), names.count("pt_gloo_runloop"), float(total[0])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are looked up there")
@pytest.mark.skipif(not group_patches(), reason="this torch has no function to replace")
def test_groups_share_a_network_thread_and_have_a_worker_each():
    """Two workers of a group end in a crash: see Note [One worker thread a group]."""
    # the group of all ranks is the eleventh
    assert run_ranks(2, _threads_of_groups) == [(1, 11, 1024.0)] * 2


def _scaled_sums() -> None:
    rank: int = dist.get_rank()
    halves = dist._make_nccl_premul_sum(0.5)
    given = torch.arange(4.0) + 10 * rank
    reduced = torch.empty(2)
    dist.reduce_scatter_tensor(reduced, given, op=halves)
    assert reduced.tolist() == [5 + 2 * rank, 6 + 2 * rank]
    assert given.tolist() == [10 * rank + i for i in range(4)]
    dist.all_reduce(given, op=halves)
    assert given.tolist() == [5, 6, 7, 8]


def test_sums_of_scaled_terms() -> None:
    """Megatron-FSDP divides its gradients so."""
    run_ranks(2, _scaled_sums)
