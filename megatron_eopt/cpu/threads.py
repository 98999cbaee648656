"""Takes the function mode along into threads that are started while the back end is on."""

import threading
from typing import Any

from megatron_eopt.cpu.mode import CudaIsCpu, put_on_stack
from megatron_eopt.cpu.patches import Patch


def _give_back_run(thread: threading.Thread, own: Any) -> None:
    """Undo ``start``'s change; a thread may have a ``run`` of its own or that of its class."""
    del thread.run
    if own is not None:
        vars(thread)["run"] = own


def thread_patches(mode: CudaIsCpu) -> list[Patch]:
    """Return a ``Thread.start`` whose threads (data loaders, asynchronous saves) have ``mode``.

    A thread's mode stack is its own and goes away with it, so nothing has to be cleaned up there.
    """
    plain_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        own, plain_run = vars(thread).get("run"), thread.run

        def run() -> None:
            _give_back_run(thread, own)
            put_on_stack(mode)
            plain_run()

        vars(thread)["run"] = run
        try:
            plain_start(thread)
        except BaseException:
            _give_back_run(thread, own)
            raise

    return [Patch(threading.Thread, "start", start)]
