"""Records values and their spread: ``python -m tests.functional.record CASE...|--all``."""

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from tests.functional import golden
from tests.functional.case_files import Case, Environment, load_cases
from tests.functional.comparer import spread_of, tolerances_of, values_compared
from tests.functional.runner import run_measured
from tests.harness import close_pools


def record(case: Case, environment: Environment) -> str:
    """Run a case, write its values and their spread, and return a line about both."""
    metrics = run_measured(case, environment, None)
    others = (run_measured(case, environment, seed) for seed in range(1, golden.SEEDS + 1))
    spread = spread_of(metrics, others)
    path = golden.write(case, environment, metrics, spread)
    line = f"{path.name}: recorded, losses stray by {spread['lm loss'][-1]:.1e}"
    compared = values_compared(tolerances_of(spread))
    if compared <= len(metrics["lm loss"]):
        line += f", elsewhere {compared} of them are compared"
    return line


def main(argv: Sequence[str] | None = None) -> int:
    """Record the cases that are named; return the exit status."""
    cases = {name: case for name, case in load_cases().items() if case.is_recorded}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)}")
    parser.add_argument("--all", action="store_true", help="every case with a file")
    parser.add_argument("--environment", choices=get_args(Environment), default="cpu_gloo")
    args = parser.parse_args(argv)
    unknown = set(args.cases) - set(cases)
    if unknown or args.all == bool(args.cases):
        parser.error(f"no such case: {sorted(unknown)}" if unknown else "name cases, or --all")
    for name in cases if args.all else args.cases:
        line = f"{name}: not for {args.environment}"
        if args.environment in cases[name].environments:
            line = record(cases[name], args.environment)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    close_pools()
    return 0


if __name__ == "__main__":
    sys.exit(main())
