"""Worker processes for one number of ranks, kept from call to call.

They are forked from a server process that has imported torch and megatron-core once. After any
error or time-out the next call gets fresh ones.
"""

import atexit
import contextlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from torch._C._distributed_c10d import TCPStore

from megatron_eopt.testing.worker import FORGET, PRELOADED, Job, Reply, serve

START_TIMEOUT_S = 180.0
CROWD = 300
"""Threads of a process that make it slow: some 100 belong to the process groups of one job."""
# how long the other ranks may still report their own errors once one rank has failed
GRACE_S = 0.5


class RankError(RuntimeError):
    """One or more ranks raised; the message holds their tracebacks."""


class UnconnectedError(RankError):
    """Ranks did not find each other: the function was not called."""


class RankTimeoutError(RankError):
    """Some ranks did not finish in time; the message holds their stacks."""


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: Any
    connection: Connection
    life: Connection
    stacks: Path

    def dump_stacks(self) -> str:
        """Let the worker write the Python stacks of its threads, also when it hangs in C++."""
        self.stacks.write_text("")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2
        before, text = None, ""
        # it is written piece by piece
        while time.monotonic() < deadline and not (text and text == before):
            time.sleep(0.05)
            before, text = text, self.stacks.read_text()
        return text.strip() or "no stack: the process did not answer"


class Pool:
    """``world_size`` worker processes; see :meth:`run`.

    With ``fresh``, they are started afresh, as processes must be that use CUDA.
    """

    def __init__(self, world_size: int, *, fresh: bool = False) -> None:
        self._context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._jobs = itertools.count()
        # in a file, each group that ranks make would wait for sleeps of 10 ms
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        try:
            for rank in range(world_size):
                self._workers.append(self._start(rank, world_size))
            self._collect(dict(enumerate(self._workers)), START_TIMEOUT_S, "starting")
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, world_size: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        their_life, our_life = self._context.Pipe(duplex=False)
        stacks = self._folder / f"stacks-{rank}"
        # not daemonic: a daemon may not start the processes of a data loader or a checkpoint
        process = self._context.Process(
            target=serve, args=(rank, world_size, theirs, their_life, stacks), daemon=False
        )
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore"):
            process.start()
        theirs.close()
        their_life.close()
        return _Worker(rank, process, ours, our_life, stacks)

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout: float,
        cpu: bool,
        backend: str = "gloo",
    ) -> list[Any]:
        """Call ``function(*args)`` on every rank and return the results in the order of ranks."""
        payload = pickle.dumps((function, args))
        job = Job(self._store.port, next(self._jobs), tuple(sys.path), cpu, backend, payload)
        message = pickle.dumps(job)
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):  # found dead, with its exit code, below
                worker.connection.send_bytes(message)
        name = getattr(function, "__qualname__", str(function))
        results = self._collect({w.rank: w for w in self._workers}, timeout, name)
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):  # found dead by the next job
                worker.connection.send_bytes(FORGET)
        return results

    @property
    def is_crowded(self) -> bool:
        """Whether threads of former jobs stay: Megatron-FSDP keeps process groups in caches."""
        tasks = [Path(f"/proc/{worker.process.pid}/task") for worker in self._workers]
        return any(len(list(folder.iterdir())) > CROWD for folder in tasks if folder.exists())

    def _collect(self, waiting: dict[int, _Worker], timeout: float, name: str) -> list[Any]:
        """Receive one reply from every waiting worker; raise on the first that is an error."""
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        connected = True
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            connections = {worker.connection: rank for rank, worker in waiting.items()}
            for connection in wait(list(connections), left):
                assert isinstance(connection, Connection)
                rank = connections[connection]
                reply = _receive(waiting.pop(rank))
                if reply.error is None:
                    results[rank] = pickle.loads(reply.result)
                else:
                    errors[rank] = reply.error
                    connected = connected and reply.connected
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors:
            kind = RankError if connected else UnconnectedError
            raise kind(_describe(errors, f"{name}: rank {_ranks(errors)} failed", waiting))
        if waiting:
            stacks = {rank: worker.dump_stacks() for rank, worker in waiting.items()}
            title = f"{name}: rank {_ranks(stacks)} not done after {timeout:g} s"
            raise RankTimeoutError(_describe(stacks, title, {}))
        return [results[rank] for rank in sorted(results)]

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.kill()
            worker.connection.close()
            worker.life.close()
        for worker in self._workers:
            worker.process.join()
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


def _receive(worker: _Worker) -> Reply:
    try:
        reply = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join(5)
        return Reply(error=f"the process ended with exit code {worker.process.exitcode}")
    assert isinstance(reply, Reply)
    return reply


def _ranks(ranks: dict[int, Any]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _describe(texts: dict[int, str], title: str, waiting: dict[int, Any]) -> str:
    if waiting:
        title += f" while rank {_ranks(waiting)} waited"
    return "\n".join([title, *(f"--- rank {r} ---\n{texts[r]}" for r in sorted(texts))])


_POOLS: dict[int, Pool] = {}


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    cpu: bool = True,
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes connected by gloo.

    Returns the results in the order of ranks; raises RankError if a rank raises, dies or is not
    done in ``timeout`` seconds. ``cpu`` says whether ``megatron_eopt.cpu`` is enabled meanwhile.
    """
    pool = _POOLS.pop(world_size, None)
    if pool is not None and pool.is_crowded:
        pool.close()
        pool = None
    job = (function, args, timeout, cpu)
    try:
        return _run(pool or Pool(world_size), job)
    except UnconnectedError:
        # gloo may lose a connection while it makes a group; new processes try once more
        return _run(Pool(world_size), job)


def _run(pool: Pool, job: tuple[Any, ...]) -> list[Any]:
    """Run a job and keep the pool, unless it fails."""
    try:
        results = pool.run(*job)
    except BaseException:
        pool.close()
        raise
    _POOLS[len(results)] = pool
    return results


def close_pools() -> None:
    """End all worker processes."""
    while _POOLS:
        _POOLS.popitem()[1].close()


# registered after multiprocessing's own handler, hence runs before it waits for our processes
atexit.register(close_pools)
