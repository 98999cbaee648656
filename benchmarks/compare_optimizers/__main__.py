"""Train the quickstart's model with several optimizers and plot their held-out losses.

Each optimizer is trained with each learning rate of its grid and each seed. The plot shows the
learning rate with the best median loss, the table all of them. Other flags go to the trainer.
"""

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.about import about, publish
from benchmarks.compare_optimizers.grid import (
    LEARNING_RATES,
    Grid,
    InputError,
    check,
    grid_of,
    runs_of,
)
from benchmarks.compare_optimizers.report import document, draw, notes, table
from benchmarks.compare_optimizers.summary import summaries
from benchmarks.compare_optimizers.trainings import Settings, claim, train_all
from benchmarks.quickstart_runs import RunError
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.imports import import_file
from scripts.quickstart import chosen_device

DEFAULT_GRID = ",".join(f"{rate:g}" for rate in LEARNING_RATES)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="./scripts/compare_optimizers.sh", description=__doc__, allow_abbrev=False
    )
    made.add_argument(
        "--optimizers",
        nargs="*",
        default=["adam", "muon"],
        metavar="NAME",
        help="optimizers to compare (default: adam muon)",
    )
    made.add_argument(
        "--lr",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=a,b,c",
        help=f"peak learning rates to try for an optimizer (default: {DEFAULT_GRID})",
    )
    made.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="FILE",
        help="Python file that registers an optimizer",
    )
    made.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3], help="(default: 1 2 3)")
    made.add_argument("--steps", type=int, default=360, help="steps per run (default: %(default)s)")
    made.add_argument(
        "--processes", type=int, default=2, help="ranks per run (default: %(default)s)"
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("runs/compare"),
        help="folder for all runs; finished runs are kept (default: %(default)s)",
    )
    made.add_argument(
        "--json", type=Path, help="file for all figures (default: comparison.json in --out)"
    )
    made.add_argument("--png", type=Path, help="file for plots (default: comparison.png in --out)")
    return made


def checked(arguments: argparse.Namespace, flags: list[str]) -> tuple[Grid, Settings]:
    """Return what to train; raise InputError for invalid arguments before training starts."""
    # imported late because they import torch, which makes --help slow
    from megatron_eopt.config.registry import optimizer_names
    from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers

    for path in arguments.imports:
        import_file(path)
        flags = [*flags, "--import", path]

    for name in ("steps", "processes"):
        if getattr(arguments, name) < 1:
            raise InputError(f"--{name} {getattr(arguments, name)}: must be at least 1")
    for name in ("json", "png"):
        path = getattr(arguments, name)
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            raise InputError(f"--{name} {path}: must be a file in a folder that exists")
        if path is not None and path.suffix != f".{name}":
            raise InputError(f"--{name} {path}: must end in .{name}")
    chosen_device()
    check(arguments.optimizers, arguments.seeds, flags, optimizer_names())
    grid = grid_of(arguments.optimizers, arguments.lr)
    settings = Settings(arguments.steps, arguments.processes, tuple(flags))
    claim(arguments.out, settings)
    return grid, settings


def main(given: list[str] | None = None) -> int:
    arguments, flags = parser().parse_known_args(given)
    try:
        grid, settings = checked(arguments, flags)
    except (InputError, ConfigurationError, OSError) as error:
        print(f"{parser().prog}: {error}", file=sys.stderr)
        return 2
    for name, rates in grid.items():
        print(f"{name}: learning rates {', '.join(f'{rate:g}' for rate in rates)}", flush=True)
    try:
        before = about()
        results = train_all(arguments.out, settings, list(runs_of(grid, arguments.seeds)))
    except KeyboardInterrupt:
        print("Stopped. Run the same command again to resume.")
        return 130
    except RunError as error:
        print(error, file=sys.stderr)
        return 1
    found = summaries(grid, results)
    Console().print(table(found))
    print(*notes(found), sep="\n")
    figures = arguments.json or arguments.out / "comparison.json"
    # runs of earlier calls can be from other commits
    before["commit"] = ", ".join(sorted({result.commit or "unknown" for result in results}))
    publish(document(settings, found, results), before, figures)
    png = arguments.png or arguments.out / "comparison.png"
    draw(settings, found).savefig(png, dpi=120)
    print(f"Plot: {png}    All figures: {figures}")
    return 0


if __name__ == "__main__":
    # stop gently as the quickstart does, also when a scheduler sends SIGTERM
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    sys.exit(main())
