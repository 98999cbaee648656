"""Saves and loads one state in several ways in turn, in the same processes."""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from benchmarks.rounds import measured, ratios, seconds, slowest
from megatron_eopt import checkpoint_files, checkpoints
from tests.harness import run_ranks
from tests.unit.stores.full_state import Case, build, sharded, steps

PLAIN, OURS, MEGATRONS = "not verified", "--verify-checkpoints", "Megatron's --verify-integrity"
WARM_UP = 1
KINDS = ("save", "load")

type State = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """One way's figures.

    Attributes:
        way: Its name.
        what: Save or load.
        seconds: Of each round, the slowest rank's.
        ratios: Quartiles of these over those of the way without verification, round by round.
        bytes_read: Of one round, by all ranks together.
        most_bytes_read: By the rank that reads most.
        checkpoint_bytes: Size of the checkpoint.
    """

    way: str
    what: str
    seconds: list[float]
    ratios: list[float]
    bytes_read: int
    most_bytes_read: int
    checkpoint_bytes: int


def _save(state: State, folder: Path, **options: Any) -> None:
    folder.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(folder), **options)


WAYS: dict[str, tuple[Callable[[State, Path], Any], Callable[[State, Path], Any]]] = {
    PLAIN: (_save, checkpoints.load),
    OURS: (checkpoint_files.save, checkpoint_files.load),
    MEGATRONS: (
        partial(_save, verify_integrity=True),
        partial(checkpoints.load, verify_integrity=True),
    ),
}
"""How to save and how to load, by name."""


def measure(
    ranks: int, layers: int, hidden: int, rounds: int, folder: Path, timeout: float
) -> list[Figures]:
    """Time all ways, and count what they read.

    Args:
        ranks: Processes.
        layers: Of the GPT whose state is saved, with layer-wise Muon.
        hidden: Its hidden size.
        rounds: Times that each way saves and loads.
        folder: Where; one checkpoint a way lies there at a time.
        timeout: Seconds for all of it.
    """
    found = run_ranks(ranks, _on_rank, layers, hidden, rounds, folder, timeout=timeout)
    size = found[0][1]
    figures = []
    for number, what in enumerate(KINDS):
        by_way = {way: [[both[number] for both in rank[way]] for rank, _ in found] for way in WAYS}
        times = {
            way: slowest([[took for took, _ in rank] for rank in by_rank])
            for way, by_rank in by_way.items()
        }
        for way, took in times.items():
            read = [rank[-1][1] for rank in by_way[way]]
            quartiles = ratios(took, times[PLAIN])
            figures.append(Figures(way, what, took, quartiles, sum(read), max(read), size))
    return figures


type Timed = tuple[float, int]
"""Seconds, and bytes read."""


def _on_rank(
    layers: int, hidden: int, rounds: int, folder: Path
) -> tuple[dict[str, list[tuple[Timed, ...]]], int]:
    case = Case("muon", {"layers": layers, "hidden": hidden, "heads": 8, "untied": False})
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    places = {way: folder / re.sub(r"\W", "", way) for way in WAYS}

    def save_and_load(way: str, round_: int) -> tuple[Timed, ...]:
        if dist.get_rank() == 0:
            shutil.rmtree(places[way], ignore_errors=True)
        return tuple(
            _timed(
                function, sharded(case, chunk, optimizer, is_loading=what == "load"), places[way]
            )
            for what, function in zip(KINDS, WAYS[way], strict=True)
        )

    times = measured({way: partial(save_and_load, way) for way in WAYS}, rounds, WARM_UP)
    return times, sum(path.stat().st_size for path in places[PLAIN].glob("*"))


def _timed(function: Callable[[State, Path], Any], state: State, folder: Path) -> Timed:
    dist.barrier()
    read = _bytes_read()
    took = seconds(partial(function, state, folder))
    return took, _bytes_read() - read


def _bytes_read() -> int:
    """Return how many bytes this process has read so far, from the page cache too."""
    return int(re.search(r"^rchar: (\d+)", Path("/proc/self/io").read_text(), re.M)[1])
