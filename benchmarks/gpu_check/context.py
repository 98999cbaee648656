"""What a section is given, and what it says."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_eopt.cpu import Device


class OnRanks(Protocol):
    """Runs a function on every rank of a world."""

    def __call__(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what ``function(*args)`` returns, in the order of ranks.

        Args:
            world_size: Number of ranks.
            function: A module-level function.
            args: Its arguments.
        """


@dataclass(frozen=True)
class Context:
    """Where a section runs.

    Attributes:
        device: ``cuda``, or ``cpu`` for a trial without GPUs.
        ranks: Ranks at most: GPUs, or processes on a CPU.
        folder: A folder that the section may fill.
        small: Whether sizes are those of a trial.
        seconds: After so many it is stopped.
        on_ranks: Runs a function on ranks with the device.
    """

    device: Device
    ranks: int
    folder: Path
    small: bool
    seconds: float
    on_ranks: OnRanks


_LONGEST = 2000


@dataclass
class Outcome:
    """What a section found.

    Attributes:
        headline: The figures that matter most, in a line.
        figures: All of them, as JSON has them.
        problems: What is wrong, as sentences; the section has passed if there is none.
        skipped: Why it cannot run here.
        left: What there was no time for; the same command goes on with it.
    """

    headline: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    skipped: str | None = None
    left: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """``passed``, ``failed``, ``not run`` or ``skipped``."""
        if self.problems:
            return "failed"
        if self.left:
            return "not run"
        return "skipped" if self.skipped else "passed"

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Make a problem of an exception in a block, so that what comes after it is still done."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            text = str(error)
            # what was wrong stands at the end of the errors of other processes
            shown = text if len(text) <= _LONGEST else f"...{text[-_LONGEST:]}"
            self.problems.append(f"{what}: {type(error).__name__}: {shown}")
