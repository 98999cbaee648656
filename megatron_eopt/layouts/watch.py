"""Reports collectives that a GPU waits for too long.

On a GPU the host does not wait for a collective, so nothing can be raised at the place where one
hangs. A thread therefore logs which step, wave and group it is; ending the process stays the duty
of the process group's own watchdog.
"""

import logging
import threading
import time
from dataclasses import dataclass

import torch.distributed as dist

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class _Watched:
    work: dist.Work
    label: str
    began: float
    timeout_s: float


class Watch:
    """Collectives under way; its thread exists only while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[_Watched] = []
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work, label: str, timeout_s: float) -> None:
        """Log an error if ``work`` is not complete ``timeout_s`` seconds from now."""
        with self._lock:
            self._watched.append(_Watched(work, label, time.monotonic(), timeout_s))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._look():
            time.sleep(_INTERVAL_S)

    def _look(self) -> bool:
        """Forget what is complete, report what is late; False once nothing is left."""
        with self._lock:
            self._watched = [entry for entry in self._watched if not entry.work.is_completed()]
            late = [e for e in self._watched if time.monotonic() - e.began > e.timeout_s]
            self._watched = [entry for entry in self._watched if entry not in late]
            busy = bool(self._watched)
            if not busy:
                self._thread = None
        for entry in late:
            logger.error(
                "all-to-all not done after %g s at %s: a rank of the group failed or is busy "
                "elsewhere",
                entry.timeout_s,
                entry.label,
            )
        return busy
