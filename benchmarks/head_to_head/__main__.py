"""Train small models with this package, with torch.optim.Muon, and with AdamW alone.

Each optimizer's learning rate is tuned with seed 0: the grid grows until the best rate is inside.
Then the best rate is trained with other seeds. Steps are timed in turn, and the weights of this
package's Muon are compared with those of torch's at equal settings.

    python -m benchmarks.head_to_head

takes about 40 minutes on two CPU cores. Ctrl-C stops it, and the same command continues: finished
runs are kept in runs.json in --out. Try it in a minute with --models gpt --steps 30 --width 32.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.about import about, publish
from benchmarks.head_to_head.deviation import SCALES, deviations
from benchmarks.head_to_head.models import TASKS, made
from benchmarks.head_to_head.results import Kept, SettingsError, mean, steps_to, tuned
from benchmarks.head_to_head.training import ARMS, Curve, hidden, step_times, trained


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head_to_head",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models", nargs="+", choices=TASKS, default=[*TASKS], help="to train (default: all)"
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[1, 2, 3],
        help="of initial weights and batches, at the best rate (default: 1 2 3)",
    )
    parser.add_argument("--steps", type=int, default=300, help="of each run (default: 300)")
    parser.add_argument(
        "--width", type=int, default=64, help="of all models, a multiple of 16 (default: 64)"
    )
    parser.add_argument(
        "--rounds", type=int, default=60, help="timed steps of each optimizer (default: 60)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/head_to_head"), help="folder (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="all figures (default: figures.json in --out)"
    )
    return parser


def of_model(name: str, options: argparse.Namespace, kept: Kept) -> dict[str, Any]:
    """Return the figures of one model: of each optimizer its grid, its seeds and its times."""
    task, arms = TASKS[name], {}

    def curve(arm: str, rate: float, seed: int) -> Curve:
        return kept(
            f"{name}, {arm}, rate {rate:g}, seed {seed}",
            lambda: trained(task, arm, rate, seed, options.steps, options.width),
            lambda points: f"held-out loss {points[-1][1]:.4f}",
        )

    for arm in ARMS:
        grid = tuned(lambda rate, arm=arm: curve(arm, rate, 0)[-1][1])
        best = min(grid, key=grid.__getitem__)
        curves = [curve(arm, best, seed) for seed in options.seeds]
        last = [points[-1][1] for points in curves]
        arms[arm] = {"grid": grid, "rate": best, "losses": last, "curve": mean(curves)}
    times = kept(
        f"{name}, seconds a step",
        lambda: step_times(task, options.rounds, options.width),
        lambda found: ", ".join(f"{arm} {of['step']:.4f}" for arm, of in found.items()),
    )
    goal = arms["adamw"]["curve"][-1][1]
    for arm, found in arms.items():
        found |= {"seconds": times[arm], "steps_to_adamw": steps_to(found["curve"], goal)}
    model = made(task, options.width, seed=0)
    sizes = {
        "parameters": sum(param.numel() for param in model.parameters()),
        "hidden": sum(param.numel() for param in hidden(model)),
    }
    return {**sizes, "arms": arms}


def main(given: list[str] | None = None) -> int:
    options, before = parser().parse_args(given), about()
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {"steps": options.steps, "width": options.width}
    try:
        kept = Kept(options.out / "runs.json", settings)
        models = {name: of_model(name, options, kept) for name in options.models}
        apart = {
            scale: kept(
                f"deviation, {scale}",
                lambda scale=scale: deviations(scale, options.width),
                lambda found: ", ".join(f"{run}: {by:.1e}" for run, by in found.items()),
            )
            for scale in SCALES
        }
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped. Run the same command again to continue.")
        return 130
    path = options.json or options.out / "figures.json"
    settings["rounds"] = options.rounds
    publish({**settings, "models": models, "deviations": apart}, before, path)
    print(f"All figures: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
