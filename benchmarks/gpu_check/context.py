"""The input and the result of a section."""

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
        """Return the results of ``function(*args)`` on all ranks, in rank order.

        Args:
            world_size: Number of ranks.
            function: A module-level function.
            args: Its arguments.
        """


_LONGEST = 2000


@dataclass
class Outcome:
    """The result of a section.

    Attributes:
        headline: The most important figures, in one line.
        figures: All figures, as JSON values.
        problems: Sentences that say what is wrong; the section passed if the list is empty.
        skipped: Why the section cannot run here.
        left: Items that the time did not allow; the next call continues with them.
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
        """Record an exception of the block as a problem, so that the section continues."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            text = str(error)
            # errors from other processes have their reason at the end
            shown = text if len(text) <= _LONGEST else f"...{text[-_LONGEST:]}"
            self.problems.append(f"{what}: {type(error).__name__}: {shown}")


@dataclass(frozen=True)
class Context:
    """Where a section runs.

    Attributes:
        device: ``cuda``, or ``cpu`` without GPUs.
        ranks: Maximum number of ranks: GPUs, or processes on a CPU.
        folder: Folder for the section's files.
        small: Whether to use small sizes.
        seconds: Time limit, after which the section is stopped.
        on_ranks: Runs a function on ranks with the device.
        outcome: What the section fills, so that a section that is stopped leaves what it has.
    """

    device: Device
    ranks: int
    folder: Path
    small: bool
    seconds: float
    on_ranks: OnRanks
    outcome: Outcome = field(default_factory=Outcome)
