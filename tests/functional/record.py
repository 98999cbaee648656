"""Records golden values: ``python -m tests.functional.record [--environment E] CASE...|--all``."""

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from tests.functional import golden
from tests.functional.case_files import Case, Environment, load_cases
from tests.functional.comparer import largest_difference
from tests.functional.runner import run_golden
from tests.harness import close_pools


def record(case: Case, environment: Environment) -> str:
    """Run a case, write its values, and return a line about what has changed."""
    try:
        before = golden.read(case, environment)["metrics"]
    except golden.GoldenError:
        before = None
    metrics = run_golden(case, environment)
    path = golden.write(case, environment, metrics)
    if before is None:
        return f"{path.name}: recorded"
    change = largest_difference(before, metrics, "lm loss")
    return f"{path.name}: recorded again, losses differ by up to {change:.1e}"


def main(argv: Sequence[str] | None = None) -> int:
    """Record the cases that are named; return the exit status."""
    cases = {name: case for name, case in load_cases().items() if case.kind == "golden"}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(cases)}")
    parser.add_argument("--all", action="store_true", help="every golden case")
    parser.add_argument("--environment", choices=get_args(Environment), default="cpu_gloo")
    args = parser.parse_args(argv)
    unknown = set(args.cases) - set(cases)
    if unknown or args.all == bool(args.cases):
        parser.error(f"no golden case: {sorted(unknown)}" if unknown else "name cases, or --all")
    for name in cases if args.all else args.cases:
        if args.environment in cases[name].environments:
            line = record(cases[name], args.environment)
        else:
            line = f"{name}: not for {args.environment}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    close_pools()
    return 0


if __name__ == "__main__":
    sys.exit(main())
