"""How ranks end that fail as processes of their own would: their connections end with them."""

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from torch import distributed

from megatron_eopt.testing import pool
from tests.harness import RankError, RankTimeoutError, run_ranks


def errors_of(
    function: Callable[..., Any], *args: Any, limit_s: float, cpu: bool
) -> dict[int, str] | None:
    """Call a function on two ranks; return the errors of those that failed, or None if none did.

    A rank that was killed has none. Raises RankTimeoutError if any rank has not ended in time.
    """
    with tempfile.TemporaryDirectory() as name, mock.patch.object(pool, "GRACE_S", limit_s):
        reports = Path(name)
        try:
            run_ranks(2, _call, function, args, reports, timeout=limit_s, cpu=cpu)
        except RankError as error:
            if "not done after" in str(error) or " waited" in str(error):
                raise RankTimeoutError(str(error)) from error
            return {int(path.name): path.read_text() for path in reports.iterdir()}
    return None


def _call(function: Callable[..., Any], args: tuple[Any, ...], reports: Path) -> None:
    try:
        function(*args)
    except BaseException:
        (reports / str(distributed.get_rank())).write_text(traceback.format_exc())
        # with the processes that it has started, which hold its connections
        os.killpg(0, signal.SIGKILL)
