"""Plugin of pytest that records for each test which lines of the package it executes.

Each test has a file of its own, to which all its processes write. Worker processes outlive a test,
so each job tells them the file.
"""

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.mutation.lines import VARIABLE, Followed, follow


class Recorder:
    """Writes a record of each test that passes."""

    def __init__(self, before: Path) -> None:
        self.before = before  # for lines that are executed before the first test
        self.log = before
        self.other: set[str] = set()  # tests that failed or were skipped

    def pytest_sessionstart(self) -> None:
        """Let jobs of worker processes write to the file of their test."""
        from megatron_eopt.testing.pool import Pool  # conftest.py has imported it

        # the server of these processes imports the package, which is not to count as a test's
        Pool(1).close()
        plain = Pool.run

        def run(pool: Pool, function: Callable[..., Any], *more: Any, **named: Any) -> list[Any]:
            return plain(pool, Followed(function, self.log), *more, **named)

        Pool.run = run  # type: ignore[assignment, method-assign]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record one test."""
        name = hashlib.sha256(item.nodeid.encode()).hexdigest()[:20]
        self.log = self.before.with_name(name)
        follow(self.log)
        start = time.monotonic()
        try:
            return (yield)
        finally:
            seconds = time.monotonic() - start
            follow(os.devnull)
            if item.nodeid not in self.other:
                self.write(item.nodeid, seconds)
            self.log.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep which tests did not pass."""
        if report.outcome != "passed":
            self.other.add(report.nodeid)

    def write(self, test: str, seconds: float) -> None:
        """Add a record to those of this process."""
        record = {"test": test, "seconds": round(seconds, 3), "lines": executed(self.log)}
        with self.before.with_name(f"{os.getpid()}.jsonl").open("a") as file:
            file.write(f"{json.dumps(record)}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the processes that run tests."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Recorder(Path(os.environ[VARIABLE])))


def executed(log: Path) -> dict[str, list[int]]:
    """Return the lines that a file names, by module."""
    found: dict[str, set[int]] = defaultdict(set)
    for entry in log.read_text().splitlines() if log.exists() else ():
        module, _, line = entry.rpartition(":")
        found[module].add(int(line))
    return {module: sorted(lines) for module, lines in sorted(found.items())}
