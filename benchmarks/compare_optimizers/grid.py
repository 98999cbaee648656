"""What is trained: optimizers, a grid of learning rates for each, and seeds; checked beforehand."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
"""The grid of every optimizer that is given none: the best ones of Adam and Muon are inside."""

FINAL_SHARE = 0.1
"""Of its learning rate at the peak, what a run ends with."""

RESERVED = (
    *("--optimizer", "--seed", "--train-iters", "--save", "--load", "--min-lr"),
    *("--eval-iters", "--eval-interval"),
)
"""Flags of the trainer that the comparison sets by itself."""

type Grid = dict[str, tuple[float, ...]]
"""The learning rates of every optimizer, ascending."""


class InputError(ValueError):
    """An argument that cannot be honoured; the message names it and its valid values."""


@dataclass(frozen=True)
class Run:
    """One training: an optimizer, the peak of its learning rate, a seed."""

    optimizer: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.optimizer}-{self.lr:g}-{self.seed}"

    def flags(self) -> list[str]:
        """Return the trainer's flags of this run alone."""
        rates = ["--lr", f"{self.lr:g}", "--min-lr", f"{FINAL_SHARE * self.lr:g}"]
        return ["--optimizer", self.optimizer, *rates, "--seed", str(self.seed)]


def check(
    optimizers: Sequence[str], seeds: Sequence[int], flags: Sequence[str], known: Collection[str]
) -> None:
    """Raise an InputError where something is unknown, twice, missing or not to be chosen."""
    names = ", ".join(sorted(known))
    if not optimizers:
        raise InputError(f"--optimizers: name at least one of {names}")
    for name in optimizers:
        if name not in known:
            raise InputError(f"--optimizers {name}: must be one of {names}")
    if not seeds:
        raise InputError("--seeds: give at least one whole number from 1 on")
    for seed in seeds:
        if seed < 1:
            raise InputError(f"--seeds {seed}: must be at least 1, as Megatron asks")
    for argument, values in (("--optimizers", optimizers), ("--seeds", seeds)):
        if len(set(values)) < len(values):
            raise InputError(f"{argument} {' '.join(map(str, values))}: name each of them once")
    for flag in flags:
        if (name := flag.partition("=")[0]) in RESERVED:
            raise InputError(
                f"{name}: is set for each run; choose with --optimizers, --lr, --seeds, --steps"
            )


def grid_of(optimizers: Sequence[str], given: Sequence[str]) -> Grid:
    """Return the learning rates of every optimizer.

    Args:
        optimizers: Their names.
        given: ``OPTIMIZER=a,b,c`` for those that do not take the default grid.

    Raises:
        InputError: If one is malformed, or is no optimizer's of these.
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
            raise InputError(f"--lr {text}: {name} has learning rates already; give all in one")
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
        raise InputError(f"--lr {text}: name each learning rate once")
    return tuple(sorted(rates))


def runs_of(grid: Grid, seeds: Sequence[int]) -> Iterator[Run]:
    """Yield all runs: optimizers in turn, so that they share what the machine does meanwhile."""
    for seed in seeds:
        for number in range(max(map(len, grid.values()))):
            for name, rates in grid.items():
                if number < len(rates):
                    yield Run(name, rates[number], seed)
