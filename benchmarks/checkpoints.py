"""Time saving and loading: this package's sharded Muon against megatron-core's layer-wise Muon.

Run it as ``python -m benchmarks.checkpoints``. In the same two processes, both contestants save and
load the model and their optimizer state in turn, with megatron-core's dist_checkpointing.
"""

import argparse
import shutil
import statistics
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from benchmarks.about import about, publish, table
from benchmarks.optimizer_step.arms import SECTIONS, Contestant
from benchmarks.rounds import measured, ratios, seconds, slowest
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.unit.storage.full_state import unwrapped

SECTION = SECTIONS[1]
NAMES = ("ours, fragments", "stock, padded layer-wise")
WARM_UP = 1


@dataclass(frozen=True)
class Figures:
    """One contestant's figures."""

    name: str
    save: list[float]  # seconds of each round on the slowest rank
    load: list[float]
    save_ratio: list[float]  # quartiles over ours, round by round
    load_ratio: list[float]
    bytes: int  # size of the files


def measure(rounds: int, timeout: float) -> list[Figures]:
    """Time both contestants."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(SECTION.ranks, _on_rank, rounds, Path(folder), timeout=timeout, cpu=True)

    def times(name: str, part: int) -> list[float]:
        return slowest([[both[part] for both in rank[name]] for rank, _ in ranks])

    def quartiles(name: str, part: int) -> list[float]:
        return ratios(times(name, part), times(NAMES[0], part))

    sizes = ranks[0][1]
    return [
        Figures(name, times(name, 0), times(name, 1), quartiles(name, 0), quartiles(name, 1), size)
        for name, size in zip(NAMES, sizes, strict=True)
    ]


def _on_rank(rounds: int, folder: Path) -> tuple[dict[str, list[tuple[float, float]]], list[int]]:
    initialize_megatron()
    arms = {arm.name: arm for arm in SECTION.arms}
    contestants = {name: Contestant(SECTION, arms[name]) for name in NAMES}
    for contestant in contestants.values():
        contestant.set_gradients(0)
        contestant.optimizer.step()
    places = {name: folder / str(number) for number, name in enumerate(NAMES)}
    works = {
        name: partial(_save_and_load, contestant, places[name])
        for name, contestant in contestants.items()
    }
    times = measured(works, rounds, WARM_UP)
    return times, [_size(place) for place in places.values()]


def _save_and_load(contestant: Contestant, place: Path, round_: int) -> tuple[float, float]:
    if dist.get_rank() == 0:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    state = _state(contestant, is_loading=False)
    saved = seconds(lambda: dist_checkpointing.save(state, str(place)))
    wanted = _state(contestant, is_loading=True)
    return saved, seconds(lambda: dist_checkpointing.load(wanted, str(place)))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=8, help="number of saves and loads of each")
    parser.add_argument("--timeout", type=float, default=400.0, help="time limit in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2")
    before = about()
    figures = measure(args.rounds, args.timeout)
    publish({"arms": (arms := [asdict(one) for one in figures])}, before, args.json)
    print(shown(arms))


def shown(arms: list[dict[str, Any]]) -> str:
    """Return the table of all figures."""
    rows = []
    for one in arms:
        row = [one["name"], f"{one['bytes'] / 1e6:.0f}"]
        for kind in ("save", "load"):
            low, middle, high = one[f"{kind}_ratio"]
            median = statistics.median(one[kind])
            over = f"{middle:.2f} ({low:.2f} .. {high:.2f})" if low < high else "1"
            row += [f"{median:.2f}", over]
        rows.append(row)
    return table("optimizer | MB: | save, s: | x ours: | load, s: | x ours:", rows)


if __name__ == "__main__":
    main()
