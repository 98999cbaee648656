"""Entry: ``python -m benchmarks.balance``."""

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.balance.figures import WORLD_SIZES, Row, measure
from benchmarks.model_shapes import MODELS

SHOWN = tuple(4**k for k in range(3, 7))
"""Numbers of ranks in the table; the file of figures has all."""

BEGIN, END = "<!-- balance table: begin -->", "<!-- balance table: end -->"

HEAD = """\
| model | ranks | ours / bound | ours: max/mean \
| one bucket: padding, max/mean | default buckets |
|---|---:|---:|---:|---:|---:|"""


def line(model: str, row: Row) -> str:
    simple, proved = f"{row.over_simple:.3f}", f"{row.over_proved:.3f}"
    cells = [
        model,
        f"{row.world_size}",
        simple if simple == proved else f"{simple}, proved {proved}",
        f"{row.imbalance:.2f}",
        f"{row.one_bucket.padding:.2f}, {row.one_bucket.imbalance:.2f}",
        f"{row.buckets.padding:.2f}, {row.buckets.imbalance:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def table(rows: Sequence[tuple[str, Row]]) -> str:
    """Return a Markdown table."""
    return "\n".join([HEAD, *(line(model, row) for model, row in rows if row.world_size in SHOWN)])


def measured(models: list[str]) -> Iterator[tuple[str, Row]]:
    for model in models:
        for world_size in WORLD_SIZES:
            yield model, measure(MODELS[model], world_size)


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    arguments = parser.parse_args()
    if arguments.write and arguments.model:
        parser.error("--write needs all models")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    print(HEAD)
    rows = []
    for model, row in measured(arguments.model or list(MODELS)):
        print(line(model, row), flush=True)
        rows.append((model, row))
    if arguments.json:
        figures = [{"model": model, **asdict(row)} for model, row in rows]
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    if arguments.write:
        before, rest = arguments.write.read_text().split(BEGIN)
        after = rest.split(END)[1]
        arguments.write.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


if __name__ == "__main__":
    main()
