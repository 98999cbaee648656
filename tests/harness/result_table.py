"""A table of what the long tests found, for the documentation."""

import os
import platform
import subprocess
from collections import Counter
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
            "Written by `./scripts/test.sh --all`: soaks, kills and layout matrices, in one run.",
            "Of each case: its figures and seconds.",
            "",
            f"Commit `{_commit()}`, torch {torch.__version__}, Python "
            f"{platform.python_version()}, {os.cpu_count()} cores.",
            "",
            "| test | cases | figures |",
            "|---|---|---|",
        ]
        tests: dict[str, dict[str, _Entry]] = {}
        for name, entry in sorted(self._entries.items()):
            test, _, case = name.removesuffix("]").partition("[")
            tests.setdefault(test, {})[case] = entry
        lines += [_row(test, cases) for test, cases in tests.items()]
        self._path.write_text("\n".join(lines) + "\n")


def _row(test: str, cases: dict[str, _Entry]) -> str:
    """Return a test's row; what all its cases begin their figures with stands there once."""
    counts = Counter(entry.outcome for entry in cases.values())
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    named = [figure.partition(": ")[0] for e in cases.values() for figure in e.figures]
    common = named[0] if len(cases) > 1 and len(named) > 1 and len(set(named)) == 1 else ""
    shown = []
    for case, entry in cases.items():
        figures = [figure.removeprefix(f"{common}: ") for figure in entry.figures]
        words = [*([f"`{case}`"] if case else []), "; ".join(figures), f"{entry.seconds:.0f}s"]
        shown.append(" ".join(filter(None, words)))
    text = (f"{common}: " if common else "") + ", ".join(shown)
    return f"| `{test}` | {outcomes} | {text.replace('|', '\\|')} |"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
