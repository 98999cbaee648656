"""Tries changes, each with the tests that execute it."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.mutation.changes import Change, digest_of
from scripts.mutation.contexts import FOLDER, Contexts, Timed, file_of
from tests.faults.trial import Ended, in_copies, put_in, run_tests

FILE = FOLDER / "results.jsonl"

HANGS = "it hangs"

FIRST_S = 20.0
"""Seconds of the tests that run first: they notice most changes, and need few files."""
START_S = 120.0
"""Seconds that pytest and worker processes may take to start, and a time-out to be told."""
SLOWER = 3.0
"""How many times as long as recorded tests may take before they count as hanging."""


@dataclass(frozen=True)
class Result:
    """What the tests said about a change."""

    name: str
    digest: str  # this and the name are the change's key
    verdict: str  # the test that noticed it, or why none did
    is_noticed: bool
    asked: str  # digest of the tests that were tried
    left_out: int  # slower tests, for which there was no time
    seconds: float

    @property
    def key(self) -> tuple[str, str]:
        """What tells the change from all others."""
        return self.name, self.digest


def tried(change: Change, tests: Sequence[Timed], folder: Path, limit: float) -> Result:
    """Run tests in a copy of the repository that has a change, until one notices it.

    ``limit`` is how many seconds they may have taken when they were recorded.
    """
    start, verdict = time.monotonic(), None
    chosen = within(tests, limit)
    first = within(chosen, FIRST_S)
    for batch in (first, [test for test in chosen if test not in first]):
        if batch and verdict is None:
            verdict = noticed_alone(change, batch, folder)
    unnoticed = f"not noticed by {len(chosen)} tests" if chosen else "no test executes it"
    return Result(
        *change.key,
        verdict=verdict or unnoticed,
        is_noticed=verdict is not None,
        asked=digest_of_tests(chosen),
        left_out=len(tests) - len(chosen),
        seconds=round(time.monotonic() - start, 1),
    )


def noticed_alone(change: Change, tests: Sequence[Timed], folder: Path) -> str | None:
    """Return how tests notice a change in a copy of the repository; None if none does."""
    with put_in(change, folder):
        verdict = noticed_by(tests, folder)
    # on a busy computer, tests may take as long without the change
    if verdict == HANGS and noticed_by(tests, folder) == HANGS:
        return None
    return verdict


def digest_of_tests(tests: Sequence[Timed]) -> str:
    """Return what is the same for the same tests in any order."""
    return digest_of("\n".join(sorted(test.name for test in tests)))


def within(tests: Sequence[Timed], limit: float) -> Sequence[Timed]:
    """Return the first of these tests that fit into so many seconds together; at least one."""
    chosen, total = [*tests[:1]], sum(test.seconds for test in tests[:1])
    for test in tests[1:]:
        if total + test.seconds <= limit:
            chosen.append(test)
            total += test.seconds
    return chosen


def noticed_by(tests: Sequence[Timed], folder: Path) -> str | None:
    """Return how tests notice what has changed in a copy of the repository; None if none does."""
    timeout = START_S + SLOWER * sum(test.seconds for test in tests)
    ended = run_tests([test.name for test in tests], folder, timeout)
    if _is_renamed(ended):
        files = dict.fromkeys(map(file_of, tests))
        ended = run_tests(list(files), folder, timeout)
    if ended.code == 0:
        return None
    if ended.code is None:
        return HANGS
    return ended.first or "pytest stops"  # for example, the package cannot be imported


def _is_renamed(ended: Ended) -> bool:
    """Tell whether tests were not found: their names come from the package."""
    lines = ended.output.splitlines()
    return ended.code == 4 and any(line.startswith("ERROR: not found:") for line in lines)


def try_all(
    changes: Iterable[Change], contexts: Contexts, jobs: int, limit: float
) -> Iterator[tuple[Change, Result]]:
    """Try changes, some at a time, and write each result to the file at once."""

    def call(change: Change, folder: Path) -> tuple[Change, Result]:
        result = tried(change, contexts.tests_of(change), folder, limit)
        write(result)
        return change, result

    return in_copies(call, changes, jobs)


def corrected(results: Sequence[Result], contexts: Contexts) -> list[Result]:
    """Return results that prove nothing, as unnoticed: their test fails without the change, too.

    A test that passes after the others of its file may fail in the order of a trial.
    """
    named = {result.verdict for result in results if result.is_noticed}
    tests = sorted((it for it in contexts.tests if it.name in named), key=lambda it: it.seconds)
    (failing,) = in_copies(fails_unchanged, [tests], jobs=1)
    wrong = [
        replace(result, verdict=f"{result.verdict} fails without it, too", is_noticed=False)
        for result in results
        if result.verdict in failing
    ]
    for result in wrong:
        write(result)
    return wrong


def fails_unchanged(tests: Sequence[Timed], folder: Path) -> set[str]:
    """Return which of these tests fail in a copy of the repository as it is.

    Raises:
        RuntimeError: If they cannot be run.
    """
    rest, found = {test.name: test for test in tests}, set()
    while rest and (name := noticed_by([*rest.values()], folder)):
        if rest.pop(name, None) is None:
            raise RuntimeError(f"without changes: {name}")
        found.add(name)
    return found


def write(result: Result) -> None:
    """Add a result to the file."""
    FILE.parent.mkdir(parents=True, exist_ok=True)
    with FILE.open("a") as file:
        file.write(f"{json.dumps(asdict(result))}\n")


def earlier() -> dict[tuple[str, str], Result]:
    """Return the results of earlier runs by the key of their change; the last one counts."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    return {result.key: result for result in results}


def still_holds(result: Result | None, tests: Sequence[Timed], limit: float) -> bool:
    """Tell whether a result of an earlier run is that of a run with these tests."""
    if result is None:
        return False
    asked = {digest_of_tests(some) for some in (within(tests, limit), tests)}
    return result.is_noticed or result.asked in asked
