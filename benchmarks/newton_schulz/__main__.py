"""Compare Newton-Schulz iterations: print a table, draw a figure, write the numbers.

    python -m benchmarks.newton_schulz [--json FILE] [--png FILE] [--pairs N]

Takes about three minutes on two cores. Times are medians with quartiles; the ratio is the median of
the ratios of alternating pairs.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.about import about, publish
from benchmarks.newton_schulz.cases import (
    MEASURED,
    SHAPES,
    Result,
    against_emerging_optimizers,
    batch_against_loop,
    on_gpu,
)
from benchmarks.page import sections
from megatron_eopt.math import PrecisionT


def draw(results: list[Result], path: Path) -> None:
    """Draw the ratios as bars with their quartiles."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = [(r, r.sample) for r in results if r.sample is not None]
    names = [f"{r.name} {'x'.join(map(str, r.shape))} {r.precision}" for r, _ in shown]
    ratios = [s.ratio for _, s in shown]
    below = [max(0.0, s.ratio - s.ratio_spread[0]) for _, s in shown]
    above = [max(0.0, s.ratio_spread[1] - s.ratio) for _, s in shown]
    figure, axes = plt.subplots(figsize=(8, 0.3 * len(shown) + 1.2), layout="constrained")
    colors = ["tab:blue" if r.precision == "highest" else "tab:orange" for r, _ in shown]
    axes.barh(names, ratios, xerr=[below, above], color=colors)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("their time / our time (blue: float32, orange: bfloat16)")
    figure.savefig(path, dpi=120)


PRODUCTS: dict[str, tuple[Sequence[PrecisionT], Callable[[dict[str, Any]], str]]] = {
    "all": (MEASURED, sections.newton_schulz),
    "fp32": (MEASURED[:1], sections.newton_schulz_fp32),
    "bf16": (MEASURED[1:], sections.newton_schulz_bf16),
}
"""What is measured, and what the page says of it."""


def shape(text: str) -> tuple[int, ...]:
    """Return the sizes of ``512x2048`` or of a batch ``64x128x512``."""
    sizes = tuple(map(int, text.split("x")))
    if len(sizes) not in (2, 3) or min(sizes) < 1:
        raise ValueError(text)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--png", type=Path, help="draw the figure into this file")
    parser.add_argument("--pairs", type=int, default=11, help="alternating pairs per line")
    parser.add_argument(
        "--products",
        choices=list(PRODUCTS),
        default="all",
        help="fp32 or bf16 alone, where one is slow on this CPU",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shape,
        metavar="ROWSxCOLUMNS",
        help="against emerging-optimizers; default: twelve of them, and what follows",
    )
    arguments = parser.parse_args()
    if arguments.pairs < 2:
        parser.error("--pairs must be at least 2")
    precisions, shown = PRODUCTS[arguments.products]
    before = about()
    sources = [against_emerging_optimizers(arguments.shapes or SHAPES, arguments.pairs, precisions)]
    if arguments.shapes is None:
        sources.append(batch_against_loop(arguments.pairs, precisions))
    if arguments.shapes is None and arguments.products == "all":
        sources.append(on_gpu(arguments.pairs))
    results = list(tqdm(chain.from_iterable(sources), unit="contest"))
    publish({"results": [asdict(result) for result in results]}, before, arguments.json, shown)
    if arguments.png:
        draw(results, arguments.png)


if __name__ == "__main__":
    main()
