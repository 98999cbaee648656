"""Saving and loading a training's state: ours in ZeRO-1 fragments against stock's layer-wise Muon.

Run as ``python -m benchmarks.checkpoints``: in the same two processes the contestants save and load
in turn with megatron-core's dist_checkpointing, each its own optimizer's state and the model's.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from benchmarks.about import about, in_turn, write_json
from benchmarks.optimizer_step.arms import SECTIONS, Contestant
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.unit.stores.full_state import unwrapped

SECTION = SECTIONS[1]
NAMES = ("ours, fragments", "stock, padded layer-wise")
WARM_UP = 1


@dataclass(frozen=True)
class Figures:
    """One contestant's figures.

    Attributes:
        name: The contestant.
        save: Seconds of each round, the slowest rank's.
        load: The same of loading.
        save_ratio: Quartiles of these over ours, round by round.
        load_ratio: The same of loading.
        bytes: Of the files.
    """

    name: str
    save: list[float]
    load: list[float]
    save_ratio: list[float]
    load_ratio: list[float]
    bytes: int


def measure(rounds: int, timeout: float) -> list[Figures]:
    """Time both."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(SECTION.ranks, _on_rank, rounds, Path(folder), timeout=timeout, cpu=True)

    def slowest(name: str, what: str) -> list[float]:
        return [max(times) for times in zip(*(rank[name][what] for rank in ranks), strict=True)]

    def ratios(name: str, what: str) -> list[float]:
        pairs = zip(slowest(name, what), slowest(NAMES[0], what), strict=True)
        return statistics.quantiles([theirs / ours for theirs, ours in pairs], n=4)

    return [
        Figures(
            name,
            slowest(name, "save"),
            slowest(name, "load"),
            ratios(name, "save"),
            ratios(name, "load"),
            ranks[0][name]["bytes"],
        )
        for name in NAMES
    ]


def _on_rank(rounds: int, folder: Path) -> dict[str, Any]:
    initialize_megatron()
    arms = [arm for arm in SECTION.arms if arm.name in NAMES]
    contestants = [Contestant(SECTION, arm, "fp32") for arm in arms]
    found: dict[str, Any] = {arm.name: {"save": [], "load": []} for arm in arms}
    for contestant in contestants:
        contestant.set_gradients(0)
        contestant.optimizer.step()
    for round_, contestant in in_turn(contestants, WARM_UP + rounds):
        place = folder / str(NAMES.index(contestant.arm.name))
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        for what, function in (("save", dist_checkpointing.save), ("load", _load)):
            seconds = _timed(function, _state(contestant, is_loading=what == "load"), place)
            if round_ >= WARM_UP:
                found[contestant.arm.name][what].append(seconds)
    for number, name in enumerate(NAMES):
        files = (folder / str(number)).rglob("*")
        found[name]["bytes"] = sum(path.stat().st_size for path in files if path.is_file())
    return found


def _state(contestant: Contestant, *, is_loading: bool) -> dict[str, Any]:
    model = unwrapped(contestant.model)
    form = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    state = contestant.optimizer.sharded_state_dict(
        model.sharded_state_dict(), is_loading=is_loading, metadata=form
    )
    return {"model": model.sharded_state_dict(), "optimizer": state}


def _load(state: dict[str, Any], folder: str) -> None:
    dist_checkpointing.load(state, folder)


def _timed(function: Callable[[Any, str], Any], state: dict[str, Any], folder: Path) -> float:
    dist.barrier()
    began = time.perf_counter()
    function(state, str(folder))
    return time.perf_counter() - began


def table(figures: Sequence[Figures]) -> str:
    """Return a Markdown table."""
    lines = [
        "| optimizer | MB | save s | x ours (quartiles) | load s | x ours (quartiles) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in figures:
        cells = [one.name, f"{one.bytes / 1e6:.1f}"]
        for seconds, (low, middle, high) in (
            (one.save, one.save_ratio),
            (one.load, one.load_ratio),
        ):
            cells += [f"{statistics.median(seconds):.2f}"]
            ours = one.name == NAMES[0]
            cells += ["1" if ours else f"{middle:.2f} ({low:.2f} .. {high:.2f})"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=8, help="times that each saves and loads")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for all of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2")
    before = about()
    figures = measure(args.rounds, args.timeout)
    print(table(figures))
    if args.json is not None:
        write_json({"arms": [asdict(one) for one in figures]}, args.json, before)


if __name__ == "__main__":
    main()
