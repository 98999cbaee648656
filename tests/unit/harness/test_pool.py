"""The worker pool shows errors in the parent, and is reused."""

import os

import pytest
import torch
import torch.distributed as dist

from megatron_eopt import cpu
from tests.harness import RankError, run_ranks


def _identify() -> tuple[int, int, int, bool]:
    return os.getpid(), dist.get_rank(), dist.get_world_size(), cpu.is_enabled()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    dist.barrier()


def _leave_things_behind() -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def _look_for_things() -> tuple[bool, bool, torch.dtype, bool, int]:
    from megatron.core import parallel_state

    left = "LEFT_BEHIND" in os.environ
    state = parallel_state.model_parallel_is_initialized()
    return left, state, torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()


def test_ranks_are_connected_and_ordered() -> None:
    results = run_ranks(2, _identify)
    assert [result[1:] for result in results] == [(0, 2, True), (1, 2, True)]
    assert [result[3] for result in run_ranks(2, _identify, cpu=False)] == [False, False]


def test_nothing_is_left_behind() -> None:
    run_ranks(2, _leave_things_behind)
    assert run_ranks(2, _look_for_things) == [(False, False, torch.float32, True, 1)] * 2


def test_an_error_names_its_rank_and_renews_the_pool() -> None:
    before = run_ranks(2, _identify)
    with pytest.raises(RankError, match=r"(?s)_fail_on: rank 1 failed.*ValueError: no luck on 1"):
        run_ranks(2, _fail_on, 1)
    after = run_ranks(2, _identify)
    assert {result[0] for result in before}.isdisjoint(result[0] for result in after)
