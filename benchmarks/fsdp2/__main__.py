"""Entry: ``python -m benchmarks.fsdp2``."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.about import about, publish
from benchmarks.fsdp2.arms import ARMS, OTHER, has_other
from benchmarks.fsdp2.measure import measure, try_uneven
from benchmarks.page.sections import fsdp2


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fsdp2",
        description=(
            "Time one Muon step on DTensor shards (gloo processes on a CPU): this package, "
            "torch.optim.Muon and, where it can be imported, muon_fsdp2, in turn on the same "
            "gradients; count what they send, and compare weights with a float32 reference."
        ),
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="steps of each; 0 counts and compares only"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds a number of ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    if 0 < args.rounds < 4:
        parser.error("--rounds must be 0 or at least 4")
    arms = [arm for arm in ARMS if arm != OTHER or has_other()]
    if OTHER not in arms:
        print("muon_fsdp2 cannot be imported and is left out", file=sys.stderr)
    before = about()
    figures = [
        one for ranks in args.ranks for one in measure(ranks, arms, args.rounds, args.timeout)
    ]
    uneven = {arm: try_uneven(2, arm, 60.0) for arm in arms}
    result = {"even": [asdict(one) for one in figures], "uneven": uneven}
    publish(result, before, args.json, fsdp2)


if __name__ == "__main__":
    main()
