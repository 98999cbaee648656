"""What the long tests found, for the documentation."""

import os
import platform
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FAULT = "fault: "
"""How the names of figures begin that count what faults of machines led to."""


def record_faults(
    fault: str, outcomes: Mapping[str, int], record_property: Callable[[str, object], None]
) -> None:
    """Record how often a kind of fault was tried, by what it led to."""
    counts = "; ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    record_property(FAULT + fault, counts)


@dataclass
class _Entry:
    outcome: str = "passed"
    seconds: float = 0.0
    figures: list[tuple[str, str]] = field(default_factory=list)


class LongResults:
    """Collects the reports of tests marked ``long`` and writes them as Markdown.

    Key figures are what tests pass to pytest's ``record_property``. Faults are counted in tests of
    every change, too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, _Entry] = {}
        self._faults: dict[str, Counter[str]] = defaultdict(Counter)
        self._outcomes: Counter[str] = Counter()
        self._begin = time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.outcome == "passed":
            for name, counts in report.user_properties:
                if name.startswith(FAULT):
                    self._add_faults(name.removeprefix(FAULT), str(counts))
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.outcome] += 1
        if "long" not in report.keywords:
            return
        entry = self._entries.setdefault(report.nodeid, _Entry())
        entry.seconds += report.duration
        if report.outcome != "passed":
            entry.outcome = report.outcome
        if report.when == "call":
            properties = report.user_properties
            entry.figures = [(k, str(v)) for k, v in properties if not k.startswith(FAULT)]

    def _add_faults(self, fault: str, counts: str) -> None:
        for count in counts.split("; "):
            number, _, outcome = count.partition(" ")
            self._faults[fault][outcome] += int(number)

    def pytest_sessionfinish(self) -> None:
        minutes = (time.monotonic() - self._begin) / 60
        totals = [f"{self._outcomes[name]:,} {name}" for name in ("passed", "failed", "skipped")]
        lines = [
            "# Results of the long tests",
            "",
            "Outcomes, seconds and measurements of long trainings, kills during a save, and every",
            "optimizer in every layout. `./scripts/test.sh --all` writes this page.",
            "",
            f"Commit `{_commit()}`, torch {torch.__version__}, Python "
            f"{platform.python_version()}, {os.cpu_count()} cores.",
            f"The whole run, with the tests of every change: {', '.join(totals)}, "
            f"{minutes:.0f} minutes.",
            "",
        ]
        tests: dict[str, dict[str, _Entry]] = {}
        for name, entry in sorted(self._entries.items()):
            test, _, case = name.removesuffix("]").partition("[")
            tests.setdefault(test, {})[case] = entry
        lines += [_line(test, cases) for test, cases in tests.items()]
        lines += _table_of(self._faults)
        self._path.write_text("\n".join(lines) + "\n")


def _table_of(faults: Mapping[str, Counter[str]]) -> list[str]:
    """Return the section about faults of machines."""
    total = sum(counts.total() for counts in faults.values())
    rows = [
        f"| {fault} | {number} | {outcome} |"
        for fault, counts in sorted(faults.items())
        for outcome, number in sorted(counts.items())
    ]
    return [
        "",
        "## Faults of machines",
        "",
        f"Tests made {total} faults on purpose. Each ended as this table says; none as a hang or a",
        "silent change.",
        "",
        "| fault | tried | outcome |",
        "|---|---|---|",
        *rows,
    ]


def _line(test: str, cases: dict[str, _Entry]) -> str:
    """Return a test's line: cases that did not pass by name, and each figure's values."""
    outcomes: dict[str, list[str]] = {}
    for case, entry in cases.items():
        outcomes.setdefault(entry.outcome, []).append(f"`{case}`")
    counts = [
        f"{len(names)} {outcome}"
        # a test without cases has no name but its own
        + (f" ({', '.join(names)})" if outcome != "passed" and names != ["``"] else "")
        for outcome, names in sorted(outcomes.items())
    ]
    seconds = sum(entry.seconds for entry in cases.values())
    values: dict[str, list[str]] = {}
    for entry in cases.values():
        for name, value in entry.figures:
            values.setdefault(name, []).append(value)
    figures = [f"{name}: {', '.join(dict.fromkeys(found))}" for name, found in values.items()]
    return f"* `{test}`: {'; '.join([*counts, f'{seconds:.0f} s', *figures])}"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
