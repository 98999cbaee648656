"""Entry: ``python -m benchmarks.optimizer_step``."""

import argparse
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from benchmarks.about import about, publish
from benchmarks.optimizer_step.arms import HIDDEN, LAYERS, SECTIONS, ProductsT
from benchmarks.optimizer_step.measure import measure
from benchmarks.optimizer_step.report import draw
from benchmarks.optimizer_step.train_step import measure_train_steps
from benchmarks.page.sections import steps, steps_fp32

TRAIN = "train step"


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
    parser.add_argument(
        "--only", choices=[*(section.name for section in SECTIONS), TRAIN], help="one part of it"
    )
    parser.add_argument(
        "--products",
        choices=get_args(ProductsT.__value__),
        default="bf16",
        help="of Newton-Schulz, and in a whole train step the model's: fp32 where the CPU has no "
        "instructions for bfloat16, which take others than ours dozens of times as long",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one section")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the times here")
    args = parser.parse_args()
    if args.rounds < 10:
        parser.error("--rounds must be at least 10")
    sections = [section for section in SECTIONS if args.only in (None, section.name)]
    before = about()
    results = [
        measure(section, args.products, args.rounds, args.timeout)
        for section in tqdm(sections, unit="layout")
    ]
    whole: list[dict[str, Any]] = []
    if args.only in (None, TRAIN):
        whole = measure_train_steps(args.products, args.rounds, args.timeout)
    figures = {
        "steps": [result.to_json() for result in results],
        "train_steps": whole,
    }
    publish(figures, before, args.json, steps if args.products == "bf16" else steps_fp32)
    if args.png is not None and results:
        draw(results, args.png)


if __name__ == "__main__":
    main()
