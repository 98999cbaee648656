"""Tells the other ranks of an error through the process group's store.

A GPU on which a kernel hangs, or that a kernel has broken, joins no collective; the store needs no
GPU. Ranks call :func:`succeed_together` at the same places, so that they count alike.
"""

import atexit
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from megatron_eopt.base.agreement import _is_alone

logger = logging.getLogger(__name__)

_FAILED, _ENDED, _DONE = "failed", "ended", "done"
_PAUSE = 2.0  # seconds between two looks for an error of another rank

_board: "Board | None" = None
"""Where ranks leave messages since they last began something together."""


class Board:
    """Messages between the ranks about one thing that all of them do."""

    def __init__(self) -> None:
        self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
        store = _get_default_store()
        number = store.add(f"megatron_eopt/{self._rank}", 1)
        self._store = PrefixStore(f"megatron_eopt/{number}", store)
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def leave(self, error: Exception) -> None:
        """Tell the other ranks of an error, if their store is still there."""
        with suppress(Exception):
            self._store.set(_FAILED, f"rank {self._rank} failed: {type(error).__name__}: {error}")
            self._store.set(_ENDED, "")

    def wait(self, seconds: float) -> None:
        """Wait until all ranks are here.

        Raises:
            RuntimeError: If one has left an error, or some do not come in time.
        """
        self._store.set(str(self._rank), "")
        if self._store.add(_DONE, 1) == self._world:
            self._store.set(_ENDED, "")
        try:
            self._store.wait([_ENDED], timedelta(seconds=seconds))
        except distributed.DistStoreError as error:
            late = [rank for rank in range(self._world) if not self._store.check([str(rank)])]
            text = f"ranks {late} have not finished in {seconds:.0f} s what all ranks do"
            raise RuntimeError(text) from error
        if text := self._left(self._store):
            raise RuntimeError(text)

    def watch(self) -> None:
        """Log from now on, at any time, what another rank leaves."""
        # a thread needs a connection of its own
        store = self._store.clone()
        self._thread = threading.Thread(target=self._look, args=(store,), daemon=True)
        self._thread.start()
        # a thread that returns from C++ while Python ends may abort the process
        atexit.register(self.close)

    def close(self) -> None:
        """Look for no messages any more."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_PAUSE)
            atexit.unregister(self.close)

    def _look(self, store: Store) -> None:
        # the store goes when its process ends
        with suppress(Exception):
            while not self._is_over.wait(_PAUSE):
                if text := self._left(store):
                    if not text.startswith(f"rank {self._rank} "):
                        logger.error("%s. This rank cannot go on without it.", text)
                    return

    @staticmethod
    def _left(store: Store) -> str:
        return str(store.get(_FAILED), "utf-8") if store.check([_FAILED]) else ""


def succeed_together[T](function: Callable[[], T], seconds: float) -> T:
    """Return what a function returns on this rank; if it raises on any rank, all ranks raise.

    Collective over the world, by the store alone. Afterwards :func:`tell` reaches the other ranks.

    Args:
        function: What each rank calls.
        seconds: How long to wait for the others.

    Raises:
        RuntimeError: If another rank has raised an error, which the text has, or does not finish.
    """
    global _board
    # the ranks of a dry run write nothing
    if _is_alone() or distributed.get_world_size() == 1:
        return function()
    if _board is not None:
        _board.close()
    _board = Board()
    try:
        result = function()
    except Exception as error:
        _board.leave(error)
        raise
    _board.wait(seconds)
    _board.watch()
    return result


def tell(error: Exception) -> None:
    """Let the other ranks log an error that this one raises."""
    if _board is not None:
        _board.leave(error)
