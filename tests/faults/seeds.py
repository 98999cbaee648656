"""Tell how many of several runs of the random layouts notice each of their faults.

    python -m tests.faults.seeds                  # of ten runs
    python -m tests.faults.seeds --runs 3 --match norm

Nothing is changed here. The result is a Markdown table.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.faults import Fault, faults
from tests.faults.trial import copy_of_repository

ROOM = "random_layouts"
PROGRAM = "tests.functional.random_layouts.runs"


def noticed_by(fault: Fault, folder: Path, runs: int) -> int:
    """Return how many runs notice a fault, in a copy of the repository that gets it meanwhile."""
    file = folder / fault.file
    before = file.read_text()
    file.write_text(fault.applied(before))
    try:
        done = subprocess.run(
            [sys.executable, "-m", PROGRAM, "--runs", str(runs)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        file.write_text(before)
    lines = done.stdout.splitlines()
    sys.stderr.write("".join(f"    {line}\n" for line in lines))
    return sum(line.startswith("noticed") for line in lines)


def main() -> int:
    """Print the table; return 1 if a fault is noticed by fewer than nine of ten runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--match", default="", help="only faults whose reason has this text")
    given = parser.parse_args()
    chosen = [fault for fault in faults() if fault.room == ROOM and given.match in fault.why]
    rarest = given.runs
    print(f"| file | what goes wrong | noticed, of {given.runs} runs |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_repository(Path(folder))
        for fault in chosen:
            count = noticed_by(fault, copy, given.runs)
            rarest = min(rarest, count)
            print(f"| `{fault.file}` | {fault.why} | {count} |", flush=True)
    return int(rarest < 0.9 * given.runs)


if __name__ == "__main__":
    sys.exit(main())
