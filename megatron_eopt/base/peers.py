"""Tells the other ranks of an error through the process group's store, without a collective.

A GPU on which a kernel hangs, or that a kernel has broken, joins no collective. Nor may a rank that
fails alone while others may be in one. Ranks call the functions here at the same places, so that
they count alike.
"""

import atexit
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,
    _get_default_timeout,
)

from megatron_eopt.base.agreement import is_alone, raise_reported, report_of
from megatron_eopt.base.errors import ConfigurationError

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
        """Tell the other ranks of an error, if it is the first and their store is still there."""
        with suppress(Exception):
            self._store.compare_set(_FAILED, "", pickle.dumps((self._rank, report_of(error))).hex())
            self._store.set(_ENDED, "")

    def raise_left(self, cause: Exception | None = None) -> None:
        """Raise the error that a rank has left, if there is one."""
        if (left := self._left(self._store)) is not None:
            raise_reported(*left, cause, is_on_all_ranks=True)

    def wait(self, seconds: float) -> None:
        """Wait until all ranks are here.

        Raises:
            ConfigurationError: If one has left this error.
            RuntimeError: If one has left another error, or some do not come in time.
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
        self.raise_left()

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
                if (left := self._left(store)) is not None:
                    rank, report = left
                    if rank != self._rank:
                        said = report if isinstance(report, str) else report[-1]
                        text = "rank %d failed: %s. This rank cannot go on without it."
                        logger.error(text, rank, said)
                    return

    @staticmethod
    def _left(store: Store) -> tuple[int, Any] | None:
        """Return the rank that has failed, and the report of its error."""
        if not store.check([_FAILED]):
            return None
        left: tuple[int, Any] = pickle.loads(bytes.fromhex(store.get(_FAILED).decode()))
        return left


def _has_no_peers() -> bool:
    # of an MPI group, torch knows no store
    return is_alone() or distributed.get_world_size() == 1 or _get_default_store() is None


@contextmanager
def ending_together() -> Iterator[None]:
    """End a block on all ranks, or raise on all, though one may have left the ranks' collectives.

    A rank that raises in it does so at once. The others learn of it when they end the block, or
    when a collective in it fails because that rank has ended.

    Raises:
        ConfigurationError: If another rank has raised this error.
        RuntimeError: If one has raised another error, or does neither within torch's time-out.
    """
    if _has_no_peers():
        yield
        return
    board = Board()
    try:
        yield
    except Exception as error:
        board.raise_left(error)
        board.leave(error)
        if isinstance(error, ConfigurationError):
            error.is_on_all_ranks = True
        raise
    board.wait(_get_default_timeout(distributed.Backend("gloo")).total_seconds())


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
    if _has_no_peers():
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
