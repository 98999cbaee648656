"""Keep finished measurements in a file, tune learning rates, and summarize all seeds."""

import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.files import write_whole
from benchmarks.head_to_head.training import Curve

START, FACTOR = (2e-3, 4e-3, 8e-3), 2
"""Learning rates that each optimizer begins with, and the ratio of neighbours."""


class SettingsError(ValueError):
    """A file has measurements with other settings."""


class Kept:
    """Measurements in a JSON file, which grows by each that is made."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.found: dict[str, Any] = {"settings": settings}
        if path.exists():
            self.found = json.loads(path.read_text())
        if (had := self.found["settings"]) != settings:
            flags = " ".join(f"--{name} {value}" for name, value in had.items())
            raise SettingsError(f"{path} has runs of {flags}; pass these, or another --out")

    def __call__(self, name: str, make: Callable[[], Any], told: Callable[[Any], str]) -> Any:
        """Return a measurement from the file, or make it and say what it is."""
        if name not in self.found:
            began = time.perf_counter()
            made = make()
            print(f"{name}: {told(made)} ({time.perf_counter() - began:.0f} s)", flush=True)
            write_whole(self.path, json.dumps({**self.found, name: made}, indent=1) + "\n")
            self.found[name] = made
        return self.found[name]


def tuned(loss_of: Callable[[float], float]) -> dict[float, float]:
    """Return losses by ascending learning rate; the best one is neither the first nor the last."""
    losses = {rate: loss_of(rate) for rate in START}
    while (best := min(losses, key=losses.__getitem__)) in (min(losses), max(losses)):
        rate = best / FACTOR if best == min(losses) else best * FACTOR
        losses[rate] = loss_of(rate)
    return dict(sorted(losses.items()))


def mean(curves: list[Curve]) -> Curve:
    """Return the mean loss of several runs at each step."""
    return [
        (points[0][0], statistics.fmean(loss for _, loss in points))
        for points in zip(*curves, strict=True)
    ]


def steps_to(curve: Curve, loss: float) -> float | None:
    """Return after how many steps a curve, linear between its points, reaches a loss; or None."""
    if curve[0][1] <= loss:
        return curve[0][0]
    for (start, above), (end, below) in pairwise(curve):
        if below <= loss:
            return start + (end - start) * (above - loss) / (above - below)
    return None
