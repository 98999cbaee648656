"""Entry: ``python -m benchmarks.profile``."""

import argparse
from pathlib import Path

from benchmarks.about import about, publish
from benchmarks.page.sections import profiles
from benchmarks.profile.measure import PRECISIONS, iterations, steps


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile",
        description=(
            "Profile one optimizer step of every layout of benchmarks.optimizer_step, and "
            "Newton-Schulz at n/m = 4: where the time goes, ours and the peer's."
        ),
    )
    parser.add_argument("--rounds", type=int, default=9, help="of each, in turn")
    parser.add_argument("--products", choices=list(PRECISIONS), default="bf16", help="of matrices")
    parser.add_argument("--timeout", type=float, default=170.0, help="seconds for one layout")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    before = about()
    figures = {
        "products": args.products,
        "steps": steps(args.products, args.rounds, args.timeout),
        "iterations": iterations(args.products, args.rounds),
    }
    publish(figures, before, args.json, profiles)


if __name__ == "__main__":
    main()
