"""Put each fault into a copy of the package, run its tests, and tell which faults go unnoticed.

    python -m tests.faults                       # all, two at a time
    python -m tests.faults checkpoint routing    # of these rooms
    python -m tests.faults --match scale --jobs 1
    python -m tests.faults --tests tests/unit/storage/test_resharding.py tests/unit/fsdp2

Nothing is changed here. The result is a Markdown table, also written to ``--write FILE``.
"""

import argparse
import contextlib
import functools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.faults import ROOT, Fault, faults

NOTICED, UNNOTICED, HANGS, BROKEN = "noticed", "unnoticed", "noticed: it hangs", "no test ran"


@dataclass(frozen=True)
class Outcome:
    """What the tests said about a fault."""

    fault: Fault
    verdict: str
    by: str  # the first test that failed
    seconds: float

    @property
    def row(self) -> str:
        """This outcome as a row of the table."""
        fault = self.fault
        cells = (fault.room, f"`{fault.file}`", fault.why, self.verdict, self.by)
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} | {self.seconds:.0f} |"


def copy_of_repository(folder: Path) -> Path:
    """Copy all files that git knows or would add, and return where they are."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.splitlines()):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder


class Changed(Protocol):
    """A change of one file."""

    @property
    def file(self) -> str: ...

    def applied(self, text: str) -> str: ...


@contextlib.contextmanager
def put_in(change: Changed, folder: Path) -> Iterator[None]:
    """Have a change in a copy of the repository."""
    file = folder / change.file
    before = file.read_text()
    file.write_text(change.applied(before))
    try:
        yield
    finally:
        file.write_text(before)
        # Python would take it for that of the next change if both files are of the same second
        Path(cache_from_source(str(file))).unlink(missing_ok=True)


class Ended(NamedTuple):
    """How pytest ended."""

    code: int | None  # None if it was stopped because it took too long
    failed: Sequence[str] = ()  # the tests that failed
    output: str = ""

    @property
    def first(self) -> str:
        """The first test that failed."""
        return next(iter(self.failed), "")


def run_tests(tests: Sequence[str], folder: Path, timeout: float, *flags: str) -> Ended:
    """Run tests of the everyday tier in a copy of the repository, by default until one fails.

    ``flags`` are pytest's, in place of ``-x``.
    """
    command = [sys.executable, "-m", "pytest", *(flags or ["-x"]), "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not long", *tests]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ended(None)
    summary = done.stdout.rpartition("short test summary info")[2]
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", summary, re.M)
    return Ended(done.returncode, failed, done.stdout + done.stderr)


def tried(fault: Fault, folder: Path, timeout: float) -> Outcome:
    """Run the tests of a fault in a copy of the repository that has it."""
    start = time.monotonic()
    with put_in(fault, folder):
        ended = run_tests(fault.tests, folder, timeout)
    verdict = {0: UNNOTICED, 1: NOTICED, None: HANGS}.get(ended.code, BROKEN)
    file, colons, test = ended.first.partition("::")
    by = f"{Path(file).name}{colons}{test}"
    return Outcome(fault, verdict, by, time.monotonic() - start)


def in_copies[T, R](function: Callable[[T, Path], R], items: Iterable[T], jobs: int) -> Iterator[R]:
    """Call ``function(item, copy of the repository)`` for some items at a time, in order."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            copies.put(copy_of_repository(Path(folder, str(number))))

        def call(item: T) -> R:
            copy = copies.get()
            try:
                return function(item, copy)
            finally:
                copies.put(copy)

        yield from pool.map(call, items)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the faults that were asked for; return 1 if one goes unnoticed."""
    description, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=description,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rooms = sorted({fault.room for fault in faults()})
    parser.add_argument("rooms", nargs="*", help=f"rooms to try: {', '.join(rooms)}")
    parser.add_argument(
        "--match", default="", help="only faults whose file or reason has this text"
    )
    parser.add_argument(
        "--tests", nargs="+", default=[""], help="only faults that tests in these files notice"
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at a time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a fault's tests")
    parser.add_argument("--write", type=Path, help="file to write the table to")
    given = parser.parse_args(arguments)
    if unknown := set(given.rooms) - set(rooms):
        parser.error(f"no such rooms: {', '.join(sorted(unknown))}")
    chosen = [
        fault
        for fault in faults()
        if fault.room in (given.rooms or rooms)
        and given.match in f"{fault.file} {fault.why}"
        and any(test.startswith(tuple(given.tests)) for test in fault.tests)
    ]
    lines = ["| room | file | what goes wrong | verdict | by | s |", "|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    outcomes = []
    trial = functools.partial(tried, timeout=given.timeout)
    for outcome in in_copies(trial, chosen, given.jobs):
        outcomes.append(outcome)
        print(outcome.row, flush=True)
    noticed = sum(outcome.verdict in (NOTICED, HANGS) for outcome in outcomes)
    total = f"{noticed} of {len(outcomes)} faults were noticed."
    print(f"\n{total}")
    if given.write is not None:
        rows = (outcome.row for outcome in outcomes)
        given.write.write_text("\n".join([*lines, *rows, "", total, ""]))
    return int(noticed < len(outcomes))
