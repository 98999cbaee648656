"""Print the table, draw the figure, write the numbers.

    python -m benchmarks.newton_schulz [--json FILE] [--png FILE] [--pairs N]

Takes about three minutes on two cores. Times are medians with quartiles; the ratio is the median of
the ratios of alternating pairs.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from benchmarks.about import about, write_json
from benchmarks.newton_schulz.cases import (
    MEASURED,
    Result,
    against_emerging_optimizers,
    batch_against_loop,
    on_gpu,
)


def line(result: Result) -> str:
    shape = "x".join(map(str, result.shape))
    head = f"| {result.name} | {shape} | {result.precision} | {result.algorithm} | "
    sample = result.sample
    if sample is None:
        return head + f"not measured | | | >= {result.target:.2f} | |"
    ours = f"{sample.ours:.2f} ({sample.ours_spread[0]:.2f}..{sample.ours_spread[1]:.2f})"
    other = f"{sample.theirs:.2f} ({sample.theirs_spread[0]:.2f}..{sample.theirs_spread[1]:.2f})"
    ratio = f"{sample.ratio:.2f} ({sample.ratio_spread[0]:.2f}..{sample.ratio_spread[1]:.2f})"
    met = "yes" if sample.ratio >= result.target else "no"
    speed = f" {result.tflops:.0f} TFLOP/s" if result.tflops else ""
    return head + f"{ours}{speed} | {other} | {ratio} | >= {result.target:.2f} | {met} |"


HEADER = (
    "| comparison | shape | precision | ours runs | ours ms | theirs ms | ratio | target | met |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--png", type=Path, help="draw the figure into this file")
    parser.add_argument("--pairs", type=int, default=11, help="alternating pairs per line")
    parser.add_argument(
        "--products",
        choices=["all", "fp32"],
        default="all",
        help="fp32 where the CPU has no products of bfloat16",
    )
    arguments = parser.parse_args()
    precisions = MEASURED[:1] if arguments.products == "fp32" else MEASURED
    before = about()
    print(HEADER)
    results: list[Result] = []
    for source in (against_emerging_optimizers, batch_against_loop):
        for result in source(arguments.pairs, precisions):
            results.append(result)
            print(line(result), flush=True)
    if arguments.products != "fp32":
        results.append(on_gpu(arguments.pairs))
        print(line(results[-1]))
    if arguments.json:
        write_json({"results": [asdict(result) for result in results]}, arguments.json, before)
    if arguments.png:
        draw(results, arguments.png)


if __name__ == "__main__":
    main()
