"""What runs inside a worker process: receive a job, set the scene, call, reply, clean up."""

import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from megatron_eopt.testing.scene import connect, forget_everything, watch_wrapped_models

# imported once by the server process that the workers are forked from
PRELOADED = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.training.training",
    "megatron_eopt.megatron_lm",
)


FORGET = b""
"""Message that all ranks have ended the job."""


@dataclass(frozen=True)
class Job:
    """A call to make."""

    port: int  # of the store in which ranks find each other
    number: int  # counts the jobs, which have keys of their own there
    path: tuple[str, ...]  # the parent's ``sys.path``, so that the test module can be found
    cpu: bool  # whether to enable the CPU back end
    backend: str  # what connects the ranks: "gloo" or "nccl"
    payload: bytes  # the pickled function and its arguments


@dataclass(frozen=True)
class Reply:
    """A pickled result, or an error's text."""

    result: bytes = b""  # what the function returned, pickled
    error: str | None = None
    connected: bool = True  # whether the function was called, or the error came before


def serve(
    rank: int, world_size: int, connection: Connection, life: Connection, stacks: Path
) -> None:
    """Serve jobs until the parent closes ``connection``; die when it closes ``life``."""
    # a group of its own, so that what it starts (a checkpoint writer's manager) ends with it
    os.setpgid(0, 0)
    threading.Thread(target=_die_with_parent, args=(life,), daemon=True).start()
    # what a test starts (data loaders, checkpoint writers) it starts as a plain process would
    multiprocessing.set_start_method("fork", force=True)
    # Ctrl-C reaches the whole foreground group; the parent is the one to react
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    watch_wrapped_models()
    # half a million objects of imported modules stay, and need not be looked at after every job
    gc.freeze()
    # each rank's first save would import torch in one more process
    filesystem_async.get_write_results_queue = functools.partial(
        filesystem_async.get_write_results_queue, mp_mode="fork"
    )
    with stacks.open("a") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        connection.send_bytes(pickle.dumps(Reply(pickle.dumps(None))))
        environment = dict(os.environ)
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            if message == FORGET:
                forget_everything()
                # what it has imported stays, too
                gc.freeze()
                continue
            reply = _answer(pickle.loads(message), rank, world_size, environment)
            connection.send_bytes(pickle.dumps(reply))


@functools.cache
def store_at(port: int) -> TCPStore:
    """Return the connection to the store of the process that started this one."""
    return TCPStore("127.0.0.1", port)


def _die_with_parent(life: Connection) -> None:
    """End this process when the parent is gone, also while it waits in a collective."""
    try:
        life.recv_bytes()
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def _answer(job: Job, rank: int, world_size: int, environment: dict[str, str]) -> Reply:
    try:
        sys.path[:] = job.path
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)
        store = PrefixStore(str(job.number), store_at(job.port))
        connect(rank, world_size, store, cpu=job.cpu, backend=job.backend)
    except BaseException:
        return Reply(error=traceback.format_exc().strip(), connected=False)
    try:
        function, args = pickle.loads(job.payload)
        return Reply(pickle.dumps(function(*args)))
    except BaseException:
        return Reply(error=traceback.format_exc().strip())
