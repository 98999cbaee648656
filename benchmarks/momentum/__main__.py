"""Train the quickstart with momentum in every dtype, and draw held-out losses against float32's.

    python -m benchmarks.momentum --out FOLDER [--json FILE] [--png FILE] [flags of the quickstart]

What a folder has already is not trained again, so it can be filled in several goes. Where bfloat16
products are slow, --muon-fp32-matmul-prec highest saves most of the time.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.about import about, publish
from benchmarks.page.sections import momentum, worst_of
from benchmarks.quickstart_runs import Curve, held_out_losses, train
from megatron_eopt.math.low_precision import MOMENTUM_DTYPES

TARGET = 0.01
"""By how much, of float32's, the loss of a run may be another."""


def trained(out: Path, dtype: str, seed: int, steps: int, flags: list[str]) -> Curve:
    """Return the held-out losses of one run by step; trains it unless that is done."""
    folder = out / f"{dtype}-{seed}"
    if steps not in held_out_losses(folder):
        print(f"Training with momentum in {dtype}, seed {seed}", flush=True)
        train(folder, steps, ["--seed", str(seed), "--muon-momentum-dtype", dtype, *flags])
    return held_out_losses(folder)


def draw(curves: dict[str, dict[int, Curve]], path: Path) -> None:
    """Draw the losses, and how far each run is from float32's with the same seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for number, (dtype, by_seed) in enumerate(curves.items()):
        for seed, curve in by_seed.items():
            style = {"color": f"C{number}", "label": dtype if seed == min(by_seed) else None}
            left.plot(list(curve), list(curve.values()), "o-", lw=1, ms=3, **style)
            exact = curves["fp32"][seed]
            percent = [100 * (loss / exact[step] - 1) for step, loss in curve.items()]
            right.plot(list(curve), percent, "o-", lw=1, ms=3, **style)
    left.set(xlabel="step", ylabel="held-out loss (nats per byte)")
    right.set(xlabel="step", ylabel="deviation from fp32, same seed (%)")
    for bound in (-100 * TARGET, 100 * TARGET):
        right.axhline(bound, color="black", lw=0.8, ls="--")
    left.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=360, help="training steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds")
    parser.add_argument("--json", type=Path, help="write all losses to this file")
    parser.add_argument("--png", type=Path, help="draw the figure into this file")
    arguments, flags = parser.parse_known_args()
    before = about()
    curves: dict[str, dict[int, Curve]] = {dtype: {} for dtype in MOMENTUM_DTYPES}
    for seed in arguments.seeds:
        for dtype in MOMENTUM_DTYPES:
            curves[dtype][seed] = trained(arguments.out, dtype, seed, arguments.steps, flags)
    last = {
        dtype: {seed: curve[arguments.steps] for seed, curve in by_seed.items()}
        for dtype, by_seed in curves.items()
    }
    document = {"steps": arguments.steps, "flags": flags, "held_out": curves}
    publish(document, before, arguments.json, momentum)
    if arguments.png:
        draw(curves, arguments.png)
    return int(any(abs(worst_of(last, dtype)) > TARGET for dtype in last))


if __name__ == "__main__":
    sys.exit(main())
