"""Check which optimizers, learning rates and seeds to train, and list the runs."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
"""Default grid of each optimizer; the best rates of Adam and Muon are inside of it."""

FINAL_SHARE = 0.1
"""Final learning rate of a run, as a share of its peak."""

RESERVED = (
    *("--optimizer", "--seed", "--train-iters", "--save", "--load", "--min-lr"),
    *("--eval-iters", "--eval-interval"),
)
"""Trainer flags that the comparison sets itself."""

type Grid = dict[str, tuple[float, ...]]
"""The learning rates of every optimizer, ascending."""


class InputError(ValueError):
    """An argument is invalid; the message names it and its valid values."""


@dataclass(frozen=True)
class Run:
    """One training run: an optimizer, its peak learning rate and a seed."""

    optimizer: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.optimizer}-{self.lr:g}-{self.seed}"

    def flags(self) -> list[str]:
        """Return the trainer flags in which this run differs from others."""
        rates = ["--lr", f"{self.lr:g}", "--min-lr", f"{FINAL_SHARE * self.lr:g}"]
        return ["--optimizer", self.optimizer, *rates, "--seed", str(self.seed)]


def check(
    optimizers: Sequence[str], seeds: Sequence[int], flags: Sequence[str], known: Collection[str]
) -> None:
    """Raise InputError for unknown, repeated or missing values, and for reserved flags."""
    names = ", ".join(sorted(known))
    if not optimizers:
        raise InputError(f"--optimizers: pass at least one of {names}")
    for name in optimizers:
        if name not in known:
            raise InputError(f"--optimizers {name}: must be one of {names}")
    if not seeds:
        raise InputError("--seeds: pass at least one whole number above 0")
    for seed in seeds:
        if seed < 1:
            raise InputError(f"--seeds {seed}: must be at least 1, as Megatron requires")
    for argument, values in (("--optimizers", optimizers), ("--seeds", seeds)):
        if len(set(values)) < len(values):
            raise InputError(f"{argument} {' '.join(map(str, values))}: pass each value only once")
    for flag in flags:
        if (name := flag.partition("=")[0]) in RESERVED:
            raise InputError(
                f"{name}: the comparison sets it; use --optimizers, --lr, --seeds or --steps"
            )


def grid_of(optimizers: Sequence[str], given: Sequence[str]) -> Grid:
    """Return the learning rates of every optimizer.

    Args:
        optimizers: Names of the optimizers.
        given: ``OPTIMIZER=a,b,c`` for each optimizer that does not use the default grid.

    Raises:
        InputError: If an entry is malformed, or names another optimizer.
    """
    grid: Grid = dict.fromkeys(optimizers, LEARNING_RATES)
    chosen: set[str] = set()
    for text in given:
        name, equals, rates = text.partition("=")
        if not equals:
            raise InputError(f"--lr {text}: must be OPTIMIZER=a,b,c, such as muon=1e-3,2e-3")
        if name not in grid:
            raise InputError(f"--lr {text}: must name one of --optimizers {' '.join(optimizers)}")
        if name in chosen:
            raise InputError(f"--lr {text}: {name} is given twice; list all its rates in one value")
        chosen.add(name)
        grid[name] = _rates(text, rates)
    return grid


def _rates(text: str, listed: str) -> tuple[float, ...]:
    try:
        rates = [float(rate) for rate in listed.split(",")]
    except ValueError:
        rule = "learning rates must be numbers, separated by commas, such as muon=1e-3,2e-3"
        raise InputError(f"--lr {text}: {rule}") from None
    if not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise InputError(f"--lr {text}: learning rates must be finite and above 0")
    if len(set(rates)) < len(rates):
        raise InputError(f"--lr {text}: pass each learning rate only once")
    return tuple(sorted(rates))


def runs_of(grid: Grid, seeds: Sequence[int]) -> Iterator[Run]:
    """Yield all runs, alternating optimizers, so that disturbances of the machine affect all."""
    for seed in seeds:
        for number in range(max(map(len, grid.values()))):
            for name, rates in grid.items():
                if number < len(rates):
                    yield Run(name, rates[number], seed)
