"""Entry: ``python -m benchmarks.balance``."""

import argparse
import logging
from collections.abc import Iterator
from pathlib import Path

from benchmarks.balance.figures import WORLD_SIZES, Row, measure
from benchmarks.model_shapes import MODELS

BEGIN, END = "<!-- balance table: begin -->", "<!-- balance table: end -->"

HEAD = """\
| model | ranks | ours / bound | ours: max/mean \
| one bucket: padding | max/mean | default buckets: padding | max/mean |
|---|---:|---:|---:|---:|---:|---:|---:|"""


def line(model: str, row: Row) -> str:
    simple, proved = f"{row.over_simple:.3f}", f"{row.over_proved:.3f}"
    cells = [
        model,
        f"{row.world_size}",
        simple if simple == proved else f"{simple}, proved {proved}",
        f"{row.imbalance:.2f}",
        f"{row.one_bucket.padding:.2f}",
        f"{row.one_bucket.imbalance:.2f}",
        f"{row.buckets.padding:.2f}",
        f"{row.buckets.imbalance:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def lines(models: list[str]) -> Iterator[str]:
    yield HEAD
    for model in models:
        for world_size in WORLD_SIZES:
            yield line(model, measure(MODELS[model], world_size))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.balance",
        description=(
            "Deal out the matrices of published models over 8 to 4096 ranks by this package's "
            "assignment, and lay them out by megatron-core's padded layer-wise function."
        ),
    )
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table there")
    arguments = parser.parse_args()
    if arguments.write and arguments.model:
        parser.error("--write needs all models")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    table = []
    for text in lines(arguments.model or list(MODELS)):
        print(text, flush=True)
        table.append(text)
    if arguments.write:
        before, rest = arguments.write.read_text().split(BEGIN)
        after = rest.split(END)[1]
        content = "\n".join(table)
        arguments.write.write_text(f"{before}{BEGIN}\n{content}\n{END}{after}")


if __name__ == "__main__":
    main()
