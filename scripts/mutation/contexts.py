"""Which tests execute a line, and how long they take."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from scripts.mutation.changes import Change, core_files, digest_of
from scripts.mutation.lines import ROOT, VARIABLE
from scripts.mutation.recorder import executed
from tests.faults.trial import copy_of_repository

FOLDER = Path(ROOT, "runs/mutation")
FILE = FOLDER / "lines.jsonl"

Lines = Mapping[str, Sequence[int]]
"""Lines of modules."""


class Timed(NamedTuple):
    """A test and how long it takes."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Contexts:
    """The lines that each test executes, in the modules that have these digests."""

    digests: Mapping[str, str]
    before: Lines  # executed before the first test, mostly while modules are imported
    tests: Mapping[Timed, Lines]

    @cached_property
    def sharing(self) -> set[str]:
        """Files whose tests share results: only the first test of these executes a line."""
        files = {file_of(test) for test in self.tests}
        shared = re.compile(r"functools\.cache|scope=")
        return {file for file in files if shared.search(Path(ROOT, file).read_text())}

    def tests_of(self, change: Change) -> list[Timed]:
        """Return the tests that execute a change: the fastest of each file, then the next ones.

        With lines that are executed while modules are imported, also the unit tests of the room.

        Raises:
            ValueError: If the module differs from the one that the tests have executed.
        """
        if self.digests.get(change.file) != change.digest:
            raise ValueError(f"{change.file} has changed since --contexts")
        first, last = change.lines

        def is_in(lines: Lines) -> bool:
            return any(first <= line <= last for line in lines.get(change.file, ()))

        found = {test for test, lines in self.tests.items() if is_in(lines)}
        files = {file_of(test) for test in found} & self.sharing
        found |= {test for test in self.tests if file_of(test) in files}
        if is_in(self.before):
            room = f"tests/unit/{change.room}/"
            found |= {test for test in self.tests if test.name.startswith(room)}
        return in_turns(found)


def in_turns(tests: Iterable[Timed]) -> list[Timed]:
    """Return the fastest test of each file, then the second ones: tests of a file look alike."""
    asked: Counter[str] = Counter()
    turns = []
    for test in sorted(tests, key=lambda test: (test.seconds, test.name)):
        turns.append((asked[file_of(test)], test.seconds, test))
        asked[file_of(test)] += 1
    return [test for *_, test in sorted(turns)]


def file_of(test: Timed) -> str:
    """Return the file that a test is in."""
    return test.name.partition("::")[0]


def load() -> Contexts:
    """Return what has been recorded.

    Raises:
        FileNotFoundError: If nothing has.
    """
    head, *records = map(json.loads, FILE.read_text().splitlines())
    tests = {Timed(it["test"], it["seconds"]): it["lines"] for it in records}
    return Contexts(head["digests"], head["before"], tests)


def record(tests: Sequence[str], jobs: int) -> None:
    """Run tests of the everyday tier in a copy of the repository, and record what they execute.

    Named tests are added to those of an earlier run, unless the package has changed since.
    """
    with tempfile.TemporaryDirectory() as name:
        copy, logs = copy_of_repository(Path(name, "copy")), Path(name, "logs")
        logs.mkdir()
        digests = {module: digest_of(text) for module, text in core_files(copy).items()}
        run(tests, copy, logs / "before", jobs)
        head = {"digests": digests, "before": _kept(executed(logs / "before"), digests)}
        records = {}
        for line in (line for file in logs.glob("*.jsonl") for line in file.open()):
            entry = json.loads(line)
            records[entry["test"]] = entry | {"lines": _kept(entry["lines"], digests)}
    if tests and FILE.exists():
        old_head, *old = map(json.loads, FILE.read_text().splitlines())
        if old_head["digests"] == digests:
            records = {entry["test"]: entry for entry in old} | records
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text("".join(f"{json.dumps(entry)}\n" for entry in (head, *records.values())))
    print(f"{FILE}: the lines of {len(records)} tests")


def _kept(lines: Lines, digests: Mapping[str, str]) -> Lines:
    return {module: numbers for module, numbers in lines.items() if module in digests}


def run(tests: Sequence[str], copy: Path, before: Path, jobs: int) -> None:
    """Run tests with the recorder.

    Tests that fail have no record, hence are not asked about changes.
    """
    workers = ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "scripts.mutation.recorder"]
    command += ["-p", "no:cacheprovider", "-m", "not long", *workers, *tests]
    path = f"{copy / 'scripts/mutation/at_start'}{os.pathsep}{copy}"
    environment = {**os.environ, "PYTHONPATH": path, VARIABLE: str(before)}
    subprocess.run(command, cwd=copy, env=environment, check=False)
