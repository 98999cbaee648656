"""Saves and loads one state in several ways in turn, in the same processes."""

import re
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_eopt import checkpoint_files, checkpoints
from tests.harness import run_ranks
from tests.unit.stores.full_state import Case, build, sharded, steps

PLAIN, OURS, MEGATRONS = "not verified", "--verify-checkpoints", "Megatron's --verify-integrity"
WARM_UP = 1

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
    size = found[0]["size"]
    figures = []
    for what in ("save", "load"):
        slowest = {way: _slowest([rank[what][way] for rank in found]) for way in WAYS}
        for way, seconds in slowest.items():
            ratios = [a / b for a, b in zip(seconds, slowest[PLAIN], strict=True)]
            read = [rank[what][way][-1][1] for rank in found]
            figures.append(
                Figures(
                    way,
                    what,
                    seconds,
                    statistics.quantiles(ratios, n=4),
                    sum(read),
                    max(read),
                    size,
                )
            )
    return figures


def _slowest(by_rank: Sequence[Sequence[tuple[float, int]]]) -> list[float]:
    return [max(seconds for seconds, _ in round_) for round_ in zip(*by_rank, strict=True)]


def _on_rank(layers: int, hidden: int, rounds: int, folder: Path) -> dict[str, Any]:
    case = Case("muon", {"layers": layers, "hidden": hidden, "heads": 8, "untied": False})
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    results: dict[str, Any] = {what: {way: [] for way in WAYS} for what in ("save", "load")}
    names = list(WAYS)
    for round_ in range(WARM_UP + rounds):
        # who goes first changes from round to round
        for way in names[round_ % len(names) :] + names[: round_ % len(names)]:
            place = folder / re.sub(r"\W", "", way)
            if dist.get_rank() == 0:
                shutil.rmtree(place, ignore_errors=True)
            for what, function in zip(("save", "load"), WAYS[way], strict=True):
                state = sharded(case, chunk, optimizer, is_loading=what == "load")
                figures = _timed(function, state, place)
                if round_ >= WARM_UP:
                    results[what][way].append(figures)
    files = (folder / re.sub(r"\W", "", PLAIN)).glob("*")
    return {**results, "size": sum(path.stat().st_size for path in files)}


def _timed(function: Callable[[State, Path], Any], state: State, folder: Path) -> tuple[float, int]:
    dist.barrier()
    read, began = _bytes_read(), time.perf_counter()
    function(state, folder)
    return time.perf_counter() - began, _bytes_read() - read


def _bytes_read() -> int:
    """Return how many bytes this process has read so far, from the page cache too."""
    return int(re.search(r"^rchar: (\d+)", Path("/proc/self/io").read_text(), re.M)[1])
