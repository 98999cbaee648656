"""Sections that pass, fail, crash and find no time: what is kept, and what is told."""

import os
import sys
import time
from dataclasses import dataclass, replace

import pytest

from benchmarks.gpu_check.plan import Section
from benchmarks.gpu_check.runner import LEAST_S, Run

SECTION = Section("quickstart", 20.0, "")
PASSES = """
import json, pathlib, sys
document = {"status": "passed", "headline": "good", "problems": [], "skipped": None, "figures": {}}
pathlib.Path(sys.argv[1], "quickstart.json").write_text(json.dumps(document))
"""
FAILS = PASSES.replace('"passed"', '"failed"').replace("[]", '["it is wrong"]')
CRASHES = "print('the last words'); import os; os.kill(os.getpid(), 11)"


@dataclass(frozen=True)
class Scripted(Run):
    """Runs a script in place of a section."""

    script: str = PASSES

    def _command(self, section, seconds):
        (self.out / "calls").open("a").write("called\n")
        return [sys.executable, "-c", self.script, str(self.out)]

    @property
    def calls(self) -> int:
        path = self.out / "calls"
        return path.read_text().count("called") if path.exists() else 0


@pytest.fixture
def run(tmp_path) -> Scripted:
    basis = {"sources": "abc"}
    return Scripted(
        tmp_path, time.monotonic() + 300, "cpu", 2, True, basis, dict(os.environ), PASSES
    )


def test_what_passed_is_kept_until_something_else_runs_it(run):
    found = run.document(SECTION)
    assert (found["status"], found["headline"]) == ("passed", "good")
    assert run.document(SECTION)["kept"]
    assert run.calls == 1
    run.document(SECTION, again=True)
    assert run.calls == 2
    assert "kept" not in replace(run, basis={"sources": "def"}).document(SECTION)
    assert run.calls == 3


def test_what_failed_runs_again(run):
    failing = replace(run, script=FAILS)
    assert failing.document(SECTION)["problems"] == ["it is wrong"]
    assert run.document(SECTION)["status"] == "passed"


def test_a_crash_is_a_failure_with_its_last_lines(run):
    found = replace(run, script=CRASHES).document(SECTION)
    assert (found["status"], found["problems"]) == ("failed", ["ended with exit code -11"])
    assert found["log"] == ["the last words"]


def test_without_time_a_section_is_not_run(run):
    late = replace(run, deadline=time.monotonic() + LEAST_S / 2)
    assert late.document(SECTION)["status"] == "not run"
    assert run.calls == 0
