"""Entry: ``python -m benchmarks.optimizer_step``."""

import argparse
from pathlib import Path

from benchmarks.optimizer_step.arms import HIDDEN, LAYERS, SECTIONS
from benchmarks.optimizer_step.measure import measure
from benchmarks.optimizer_step.report import draw, table, write_json


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer_step",
        description=(
            f"Time one optimizer step of a GPT ({LAYERS} layers, hidden {HIDDEN}, bf16) on gloo "
            "processes with one thread each: this package in an exact mode against unmodified "
            "megatron-core with emerging-optimizers, in turn in the same processes, on the same "
            "gradients; the weights are compared at the end."
        ),
    )
    parser.add_argument("--rounds", type=int, default=15, help="steps of each, at least 10")
    parser.add_argument("--timeout", type=float, default=170.0, help="seconds for one section")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the times here")
    args = parser.parse_args()
    if args.rounds < 10:
        parser.error("--rounds must be at least 10")
    results = [measure(section, args.rounds, args.timeout) for section in SECTIONS]
    print(table(results))
    if args.json is not None:
        write_json(results, args.json)
    if args.png is not None:
        draw(results, args.png)


if __name__ == "__main__":
    main()
