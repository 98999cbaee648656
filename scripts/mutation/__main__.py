"""Run ``python -m scripts.mutation --help``."""

import argparse
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import scripts.mutation
from scripts.mutation import contexts, trial
from scripts.mutation.changes import Change, all_changes, core_files, room_of
from scripts.mutation.lines import ROOT
from scripts.mutation.report import Outcome, report
from scripts.mutation.together import try_together

RECORD = "Record which lines each test executes: python -m scripts.mutation --contexts"


def last_commit_of_tests() -> str:
    """Return the hash of the last commit that changed tests."""
    command = ["git", "log", "-1", "--format=%H", "--", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def drawn(every: Sequence[Change], count: int, seed: str) -> list[Change]:
    """Return changes at random; with a larger count, these and more."""
    return random.Random(seed).sample(every, len(every))[:count]


def parser(rooms: Sequence[str]) -> argparse.ArgumentParser:
    """Return what reads the command line."""
    description, _, more = (scripts.mutation.__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(
        prog="python -m scripts.mutation",
        description=description,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--count", type=int, default=150, help="changes to draw")
    made.add_argument("--seed", default="", help="default: the last commit that changed tests")
    made.add_argument("--rooms", nargs="+", choices=rooms, default=[], help="default: all rooms")
    made.add_argument("--jobs", type=int, default=2, help="changes tried at a time")
    made.add_argument("--limit", type=float, default=60, help="seconds of tests for each change")
    made.add_argument(
        "--together", type=int, default=8, help="changes at a time that all other tests are asked"
    )
    made.add_argument("--write", type=Path, help="file to write the report to")
    made.add_argument(
        "--contexts",
        nargs="*",
        metavar="TESTS",
        help="record which lines tests execute: all, or more tests of the same package",
    )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Record lines, or try a sample and report."""
    texts = core_files()
    given = parser(sorted({*map(room_of, texts)})).parse_args(arguments)
    if given.contexts is not None:
        contexts.record(given.contexts, given.jobs)
        return
    if not contexts.FILE.exists():
        sys.exit(f"No lines are recorded. {RECORD}")
    every, seed = all_changes(given.rooms), given.seed or last_commit_of_tests()
    outcomes = tried(drawn(every, given.count, seed), given)
    text = report(outcomes, texts, seed, len(every))
    print(f"\n{text}")
    if given.write is not None:
        given.write.write_text(text)


def tried(changes: Sequence[Change], given: argparse.Namespace) -> list[Outcome]:
    """Return the results of earlier runs, and of those changes that have none now."""
    known, done = contexts.load(), trial.earlier()
    old = {change.file for change in changes if known.digests.get(change.file) != change.digest}
    if old:
        sys.exit(f"Lines were recorded before {', '.join(sorted(old))} changed. {RECORD}")
    missing = [
        change
        for change in changes
        if not trial.still_holds(done.get(change.key), known.tests_of(change), given.limit)
    ]
    print(
        f"{len(changes) - len(missing)} were tried before, {len(missing)} are tried now", flush=True
    )
    new = trial.try_all(missing, known, given.jobs, given.limit)
    for number, (change, result) in enumerate(new, 1):
        done[change.key] = result
        where = f"{change.file}:{change.lines[0]} {change.kind}"
        print(f"{number} {where}: {result.verdict} ({result.seconds:.0f} s)", flush=True)
    results = ((change, done[change.key]) for change in changes)
    rest = [(change, its) for change, its in results if its.left_out and not its.is_noticed]
    print(f"All tests are asked about {len(rest)} changes", flush=True)
    for change, result in try_together(rest, known, given.together, given.jobs):
        done[change.key] = result
        print(f"{change.file}:{change.lines[0]} {change.kind}: {result.verdict}", flush=True)
    print("Do the tests that failed pass without changes?", flush=True)
    for result in trial.corrected([done[change.key] for change in changes], known):
        done[result.key] = result
        print(f"{result.name}: {result.verdict}")
    return [(change, done[change.key]) for change in changes]


if __name__ == "__main__":
    main()
