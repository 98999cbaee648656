"""Faults that the tests must notice, and a program that puts them into the package.

Each file ``<room>.yaml`` lists faults: the text ``old`` in ``file`` is replaced by ``new``. ``why``
says what goes wrong then, and ``tests`` where it should be noticed.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent


@dataclass(frozen=True)
class Fault:
    """One change of the package."""

    room: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: If the file does not have the text exactly once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has this text {text.count(self.old)} times:\n{self.old}")
        return text.replace(self.old, self.new)


def faults() -> list[Fault]:
    """Return all faults, room by room."""
    return [
        Fault(path.stem, **{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(FOLDER.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text())
    ]
