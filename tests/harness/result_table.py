"""A table of what the long tests found, for the documentation."""

import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class _Entry:
    outcome: str = "passed"
    seconds: float = 0.0
    figures: list[str] = field(default_factory=list)


class ResultTable:
    """Collects the reports of tests marked ``long`` and writes them as a Markdown table.

    Key figures are what tests pass to pytest's ``record_property``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, _Entry] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if "long" not in report.keywords:
            return
        entry = self._entries.setdefault(report.nodeid, _Entry())
        entry.seconds += report.duration
        if report.outcome != "passed":
            entry.outcome = report.outcome
        if report.when == "call":
            entry.figures = [f"{name}: {value}" for name, value in report.user_properties]

    def pytest_sessionfinish(self) -> None:
        lines = [
            "# Results of the long tier",
            "",
            "Written by `./scripts/test.sh --all`. Soaks, kills and layout matrices; every figure",
            "is from one run.",
            "",
            f"Commit `{_commit()}`, torch {torch.__version__}, Python "
            f"{platform.python_version()}, {os.cpu_count()} cores.",
            "",
            "| test | outcome | seconds | figures |",
            "|---|---|---:|---|",
        ]
        for name, entry in sorted(self._entries.items()):
            figures = "; ".join(entry.figures).replace("|", "\\|")
            lines.append(f"| `{name}` | {entry.outcome} | {entry.seconds:.0f} | {figures} |")
        self._path.write_text("\n".join(lines) + "\n")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
