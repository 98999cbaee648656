"""Entry: ``python -m benchmarks.optimizer_step``."""

import argparse
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from benchmarks.about import about, publish
from benchmarks.optimizer_step.arms import HIDDEN, LAYERS, SECTIONS
from benchmarks.optimizer_step.measure import measure, shown


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optimizer_step",
        description=(
            f"Count what one optimizer step of a GPT ({LAYERS} layers, hidden {HIDDEN}, bf16) "
            "computes and sends. This package is compared with megatron-core in the same gloo "
            "processes, on the same gradients. The weights are compared at the end. To measure "
            "times on GPUs, use ./scripts/gpu_check.sh."
        ),
    )
    names = [section.name for section in SECTIONS]
    parser.add_argument("--only", choices=names, help="run only this layout")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="time limit per layout in seconds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    sections = [section for section in SECTIONS if args.only in (None, section.name)]
    before = about()
    found = [one for each in tqdm(sections, unit="layout") for one in measure(each, args.timeout)]
    publish({"steps": (steps := [asdict(one) for one in found])}, before, args.json)
    print(shown(steps))


if __name__ == "__main__":
    main()
