"""How often random layouts notice a fault: ``python -m tests.functional.random_layouts.runs``.

Each run has fresh seeds, as in the tests, and ends with the first draw that fails.
"""

import argparse
import os
import tempfile
from pathlib import Path

from tests.functional.random_layouts.draws import DRAWS, draw_of
from tests.functional.random_layouts.trial import problems_of
from tests.harness import close_pools


def fresh_seed(number: int) -> int:
    """Return a random seed of a draw's number."""
    return int.from_bytes(os.urandom(4)) * DRAWS + number


def fails(seed: int, timeout: float) -> bool:
    """Return whether a draw fails."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return bool(problems_of(draw_of(seed), Path(folder), timeout))
        except Exception:
            return True


def main() -> None:
    """Print a line for each run: the number of draws until one failed, and its seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=15, help="seconds for a draw's ranks")
    given = parser.parse_args()
    for _ in range(given.runs):
        seeds = map(fresh_seed, range(DRAWS))
        failed = next((seed for seed in seeds if fails(seed, given.timeout)), None)
        what = "unnoticed" if failed is None else f"noticed by draw {failed % DRAWS}: {failed}"
        print(what, flush=True)  # noqa: T201  this is a program
    close_pools()


if __name__ == "__main__":
    main()
