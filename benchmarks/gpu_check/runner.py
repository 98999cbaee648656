"""Run sections one after another, each in its own process, within a time limit."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.files import write_whole
from benchmarks.gpu_check.plan import Section
from benchmarks.machine import ROOT

LEAST_S = 20.0
"""A section does not start with less time left, which its imports alone need."""

GRACE_S = 5.0
"""Seconds in which a section that is stopped writes what it has found."""

LAST_LINES = 30

type Document = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One call of the command.

    Attributes:
        out: Folder for results.
        deadline: End of the time limit, as a value of ``time.monotonic``.
        device: ``cuda`` or ``cpu``.
        ranks: Number of GPUs, or of processes on a CPU.
        small: Whether to use small sizes.
        basis: Code, machine and sizes; earlier results are kept if theirs are the same.
        environment: Environment variables of the sections' processes.
    """

    out: Path
    deadline: float
    device: str
    ranks: int
    small: bool
    basis: Document
    environment: dict[str, str]

    def document(self, section: Section, *, again: bool = False) -> Document:
        """Return the earlier result of a section if it passed and not ``again``; else run it."""
        kept = None if again else self.kept(section)
        if kept is not None:
            return kept
        left = self.deadline - time.monotonic()
        if left < LEAST_S:
            return not_run(f"only {max(0, left):.0f} s were left")
        self._begin(section, again=again)
        return self._run(section, min(left, section.limit_s))

    def kept(self, section: Section) -> Document | None:
        """Return an earlier result with the same code, machine and sizes, if any."""
        found = self._found(section)
        if found.get("basis") == self.basis and found["status"] in ("passed", "skipped"):
            return found | {"kept": True}
        return None

    def _found(self, section: Section) -> Document:
        """Return the content of a section's file, or {} if it cannot be read."""
        with contextlib.suppress(OSError, json.JSONDecodeError):
            document: Document = json.loads(self._path(section).read_text())
            return document
        return {}

    def _begin(self, section: Section, *, again: bool) -> None:
        """Delete a section's files, unless it is unfinished and continues on the same basis."""
        found = self._found(section)
        if again or found.get("basis") != self.basis or found.get("status") != "not run":
            shutil.rmtree(self.out / section.name, ignore_errors=True)
        self._write(section, not_run("it was stopped") | {"basis": self.basis})

    def _write(self, section: Section, document: Document) -> None:
        write_whole(self._path(section), json.dumps(document, indent=1) + "\n")

    def _run(self, section: Section, seconds: float) -> Document:
        path, log = self._path(section), self.out / f"{section.name}.log"
        began = time.monotonic()
        in_time, code = _watch(self._command(section, seconds), log, self.environment, seconds)
        took = round(time.monotonic() - began, 1)
        document: Document = json.loads(path.read_text())
        # the section itself writes no basis, so another file is from before it started
        found = {} if "basis" in document else document
        figures = {"figures": found.get("figures", {})}
        if not in_time and seconds < section.limit_s:
            why = f"stopped after {took:.0f} s by the time limit of all sections"
            document = not_run(why) | figures
        elif not in_time or code != 0 or not found:
            why = f"ended with exit code {code}" if in_time else f"not done after {took:.0f} s"
            problems = [*found.get("problems", ()), why]
            document = {"status": "failed", "problems": problems, "headline": "", **figures}
        document |= {"seconds": took, "basis": self.basis}
        if document["status"] == "failed":
            document["log"] = _last_lines(log)
        self._write(section, document)
        return document

    def _path(self, section: Section) -> Path:
        return self.out / f"{section.name}.json"

    def _command(self, section: Section, seconds: float) -> list[str]:
        command = [sys.executable, "-P", "-m", "benchmarks.gpu_check.section", section.name]
        command += ["--out", str(self.out), "--device", self.device, "--ranks", str(self.ranks)]
        command += ["--seconds", f"{seconds:.0f}", *(["--small"] if self.small else [])]
        return command


def not_run(why: str) -> Document:
    """Return the document of a section that had no time."""
    return {"status": "not run", "seconds": 0.0, "skipped": why, "figures": {}, "headline": ""}


def _watch(
    command: Sequence[str], log: Path, environment: dict[str, str], seconds: float
) -> tuple[bool, int]:
    """Run a command, log its output; return whether it ended by itself, and its exit code."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return True, process.wait(seconds - GRACE_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return False, -1
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and all its descendants, including those with their own sessions."""
    import psutil  # type: ignore[import-untyped]

    try:
        everyone = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        everyone = []
    # processes whose parent has ended still belong to the process group
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in everyone:
        with contextlib.suppress(psutil.Error):
            child.kill()
    process.wait()


def _last_lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-LAST_LINES:]
