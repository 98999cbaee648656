"""The collectives that gloo lacks equal what NCCL's would give."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.cpu.gloo import group_patches
from tests.harness.each_rank import on_ranks


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks("ranks")
def test_uneven_all_gather(ranks: int, async_op: bool) -> None:
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


@on_ranks(2)
def test_all_to_all_with_tensor_sizes() -> None:
    rank = dist.get_rank()
    sent = torch.tensor([[1, 2], [3, 1]])
    given = torch.arange(int(sent[rank].sum())) + 10 * rank
    received = torch.empty(int(sent[:, rank].sum()), dtype=torch.int64)
    sizes: Any = sent[:, rank], sent[rank]
    dist.all_to_all_single(received, given, *sizes)
    assert received.tolist() == ([0, 10, 11, 12] if rank == 0 else [1, 2, 13])


def _threads() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are looked up there")
@pytest.mark.skipif(not group_patches(), reason="this torch has no function to replace")
@on_ranks(2)
def test_groups_share_a_network_thread_and_have_a_worker_each():
    """Two workers of a group end in a crash: see Note [One worker thread a group]."""
    dist.barrier()  # the worker of all ranks' group has named itself once it has worked
    before = _threads()
    groups: list[Any] = [dist.new_group([0, 1]) for _ in range(10)]
    total = torch.ones(3)
    for group in groups:
        dist.all_reduce(total, group=group)
    after = _threads()
    network, workers = (
        after.count(name) - before.count(name) for name in ("gloo_tcp_loop", "pt_gloo_runloop")
    )
    assert (network, float(total[0])) == (0, 1024.0)
    # an earlier test's group may have come to its thread only now
    assert workers < 20
