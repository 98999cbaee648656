"""Asks all tests about changes that the first ones have not noticed, several changes at a time.

A test that passes with all of them is taken to pass with each. It may not if one keeps another's
line from being executed, so that too few count as noticed. Tests that fail are asked about each
change alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from scripts.mutation.changes import Change
from scripts.mutation.contexts import Contexts, Timed, file_of
from scripts.mutation.trial import (
    SLOWER,
    START_S,
    Result,
    digest_of_tests,
    noticed_alone,
    write,
)
from tests.faults.trial import in_copies, put_in, run_tests

PLAIN_ENDS = (0, 1)
"""How pytest ends if it has run all tests."""

type Asked = Mapping[Change, set[Timed]]
"""The tests that execute each change."""


def grouped(changes: Sequence[Change], size: int) -> list[list[Change]]:
    """Return groups of at most so many changes, each of another file."""
    groups: list[list[Change]] = []
    for change in changes:
        fits = (
            group
            for group in groups
            if len(group) < size and all(change.file != other.file for other in group)
        )
        group = next(fits, None)
        if group is None:
            groups.append(group := [])
        group.append(change)
    return groups


def try_together(
    outcomes: Sequence[tuple[Change, Result]], contexts: Contexts, size: int, jobs: int
) -> Iterator[tuple[Change, Result]]:
    """Ask all tests about these changes, and write each result to the file."""
    old = dict(outcomes)
    asked = {change: {*contexts.tests_of(change)} for change in old}

    def call(group: Sequence[Change], folder: Path) -> dict[Change, str]:
        return noticed(group, asked, folder, jobs)

    groups = grouped(list(old), size)
    for group, found in zip(groups, in_copies(call, groups, jobs=1), strict=True):
        for change in group:
            verdict = found.get(change, f"not noticed by {len(asked[change])} tests")
            result = replace(
                old[change],
                verdict=verdict,
                is_noticed=change in found,
                asked=digest_of_tests([*asked[change]]),
                left_out=0,
            )
            write(result)
            yield change, result


def noticed(group: Sequence[Change], asked: Asked, folder: Path, jobs: int) -> dict[Change, str]:
    """Return which changes are noticed, and by which test."""
    found: dict[Change, str] = {}
    tests = {test for change in group for test in asked[change]}
    while left := [change for change in group if change not in found]:
        failing = failing_with(left, tests, folder, jobs)
        new: dict[Change, str] = {}
        for test in sorted(failing, key=lambda test: test.seconds):
            # it has failed because of a change that is known now, or is asked in the next round
            if any(test in asked[change] for change in new):
                continue
            for change in (change for change in left if test in asked[change]):
                if by := noticed_alone(change, [test], folder):
                    new[change] = by
        if not new:
            break
        found |= new
        tests = failing
    return found


def failing_with(
    changes: Sequence[Change], tests: set[Timed], folder: Path, jobs: int
) -> set[Timed]:
    """Return which tests fail in a copy of the repository that has all of these changes."""
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(put_in(change, folder))
        timeout = START_S + SLOWER * sum(test.seconds for test in tests)
        names, files = (sorted({of(test) for test in tests}) for of in (itemgetter(0), file_of))
        flags = "-n", str(jobs), "--dist", "loadfile"
        ended = run_tests(names, folder, timeout, *flags)
        if ended.code not in PLAIN_ENDS:
            # names of some tests come from the package
            ended = run_tests(files, folder, timeout, *flags)
    known = ended.code in PLAIN_ENDS
    return {test for test in tests if test.name in ended.failed or not known}
