"""The worker pool shows errors and time-outs in the parent, and is reused."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_eopt import cpu
from tests.harness import RankError, RankTimeoutError, run_ranks
from tests.harness.pool import CROWD, Pool, UnconnectedError, close_pools


def _identify() -> tuple[int, int, int, bool]:
    return os.getpid(), dist.get_rank(), dist.get_world_size(), cpu.is_enabled()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    dist.barrier()


def _all_fail() -> None:
    raise ValueError(f"rank {dist.get_rank()} fails")


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def _hang_in_a_collective_on(rank: int) -> None:
    if dist.get_rank() == rank:
        dist.all_reduce(torch.ones(1))


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


def _cannot_be_pickled() -> object:
    return lambda: None


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor)
    return tensor


def test_ranks_are_connected_and_ordered() -> None:
    results = run_ranks(2, _identify)
    assert [result[1:] for result in results] == [(0, 2, True), (1, 2, True)]
    assert [result[3] for result in run_ranks(2, _identify, cpu=False)] == [False, False]
    assert [r.tolist() for r in run_ranks(2, _sum, torch.ones(2))] == [[2, 2], [2, 2]]


def test_processes_are_reused() -> None:
    assert run_ranks(2, _identify) == run_ranks(2, _identify)


_kept: list[threading.Thread] = []


def _leave_threads(count: int) -> None:
    _kept.extend(
        threading.Thread(target=time.sleep, args=(600,), daemon=True) for _ in range(count)
    )
    for thread in _kept:
        thread.start()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted there")
def test_processes_that_keep_too_many_threads_are_renewed() -> None:
    first = run_ranks(2, _identify)
    run_ranks(2, _leave_threads, CROWD)
    assert {pid for pid, *_ in run_ranks(2, _identify)}.isdisjoint(pid for pid, *_ in first)


def test_nothing_is_left_behind() -> None:
    run_ranks(2, _leave_things_behind)
    assert run_ranks(2, _look_for_things) == [(False, False, torch.float32, True, 1)] * 2


def test_an_error_names_its_rank_promptly_and_renews_the_pool() -> None:
    before = run_ranks(2, _identify)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)_fail_on: rank 1 failed.*ValueError: no luck on 1"):
        run_ranks(2, _fail_on, 1)
    assert time.monotonic() - start < 10
    after = run_ranks(2, _identify)
    assert {result[0] for result in before}.isdisjoint(result[0] for result in after)


def test_errors_of_all_ranks_are_shown() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 ---.*rank 0 fails.*rank 1 ---.*rank 1 fails"):
        run_ranks(2, _all_fail)


def test_a_dead_rank_is_an_error() -> None:
    with pytest.raises(
        RankError, match=r"(?s)_die_on: rank 0.*rank 0 ---\nthe process ended with exit code 7"
    ):
        run_ranks(2, _die_on, 0)


def test_a_timeout_shows_where_the_rank_is_stuck() -> None:
    run_ranks(2, _identify)
    expected = r"(?s)rank 1 not done after 2 s.*all_reduce.*_hang_in_a_collective_on"
    with pytest.raises(RankTimeoutError, match=expected) as caught:
        run_ranks(2, _hang_in_a_collective_on, 1, timeout=2)
    assert "--- rank 0 ---" not in str(caught.value)
    run_ranks(2, _identify)


def test_a_result_must_be_picklable() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_ranks(1, _cannot_be_pickled)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_survives_the_session(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(
        "import signal\n"
        # a shell that runs this in the background has interrupts ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tests.harness import pool\n"
        "from tests.unit.harness import test_pool as t\n"
        "pool.PRELOADED = ('torch',)\n"  # starts sooner
        "if __name__ == '__main__':\n"
        "    print(*[r[0] for r in pool.run_ranks(2, t._identify, cpu=False)], flush=True)\n"
        "    pool.run_ranks(2, t._hang_in_a_collective_on, 1, cpu=False)\n"
    )
    root = Path(__file__).parents[3]
    session = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)],
        env=os.environ | {"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert session.stdout is not None
        workers = [int(pid) for pid in session.stdout.readline().split()]
        assert len(workers) == 2
        time.sleep(0.5)
        session.send_signal(number)
        session.wait(20)
        deadline = time.monotonic() + 10
        while any(map(_alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(_alive, workers))
    finally:
        session.kill()
        session.wait()


def _lose_connections(monkeypatch, times: int) -> None:
    """Let the first jobs find no rendezvous."""
    close_pools()
    run, left = Pool.run, iter(range(times))

    def losing(pool: Pool, *job: Any) -> list[Any]:
        if next(left, None) is not None:
            (pool._folder / "store-0").mkdir()
        return run(pool, *job)

    monkeypatch.setattr(Pool, "run", losing)


def test_ranks_that_do_not_find_each_other_try_again(monkeypatch):
    _lose_connections(monkeypatch, 1)
    assert [rank for _, rank, *_ in run_ranks(2, _identify)] == [0, 1]


def test_ranks_that_never_find_each_other_are_an_error(monkeypatch):
    _lose_connections(monkeypatch, 2)
    with pytest.raises(UnconnectedError, match="init_process_group"):
        run_ranks(2, _identify)
