"""Sections that pass, fail, crash, hang and find no time: what is kept, and what is told."""

import json
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import report
from benchmarks.gpu_check.plan import SECTIONS, Section
from benchmarks.gpu_check.runner import LEAST_S, Run
from benchmarks.gpu_check.wheels import WheelsError, install
from benchmarks.machine import ROOT

SECTION = Section("quickstart", 20.0, "")
PASSES = """
import json, pathlib, sys
document = {"status": "passed", "headline": "good", "problems": [], "skipped": None, "figures": {}}
pathlib.Path(sys.argv[1], "quickstart.json").write_text(json.dumps(document))
"""
FAILS = PASSES.replace('"passed"', '"failed"').replace("[]", '["it is wrong"]')
CRASHES = "print('the last words'); import os; os.kill(os.getpid(), 11)"
HANGS = """
import pathlib, subprocess, sys, time
# as launchers do
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                         start_new_session=True)
pathlib.Path(sys.argv[1], "child").write_text(str(child.pid))
time.sleep(60)
"""


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


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_what_hangs_is_ended_with_all_that_it_started(run):
    found = replace(run, script=HANGS).document(SECTION._replace(limit_s=3.0))
    assert found["status"] == "failed"
    assert found["problems"][0].startswith("not done after")
    child = int((run.out / "child").read_text())
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)


PART = PASSES.replace('"passed"', '"not run"')


def test_what_there_was_no_time_for_goes_on_with_what_it_has(run):
    kept = run.out / SECTION.name / "recorded"

    def call(script, **changes):
        found = replace(run, script=script, **changes).document(SECTION)
        had = kept.exists()
        kept.parent.mkdir(exist_ok=True)
        kept.touch()
        return found["status"], had

    assert call(PART) == ("not run", False)
    assert call(PART) == ("not run", True)
    assert call(PART, basis={"sources": "def"}) == ("not run", False)
    assert call(FAILS, basis={"sources": "def"}) == ("failed", True)
    assert call(PASSES, basis={"sources": "def"}) == ("passed", False)


def test_what_a_section_left_whose_command_was_killed_is_no_result(run):
    # the section writes, and what the result holds for is added by the command
    (run.out / "quickstart.json").write_text('{"status": "passed"}')
    assert run.kept(SECTION) is None
    assert run.document(SECTION)["status"] == "passed"
    assert run.calls == 1
    found = replace(run, script="").document(SECTION, again=True)
    assert found["problems"] == ["ended with exit code 0"]


def test_without_time_a_section_is_not_run(run):
    late = replace(run, deadline=time.monotonic() + LEAST_S / 2)
    assert late.document(SECTION)["status"] == "not run"
    assert run.calls == 0


@pytest.mark.long
def test_one_that_all_time_was_too_short_for_is_not_run_and_not_kept(run, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_check.runner.LEAST_S", 0.1)
    short = replace(run, script=HANGS, deadline=time.monotonic() + 2)
    found = short.document(SECTION)
    assert found["status"] == "not run"
    assert "when all time was up" in found["skipped"]
    assert run.kept(SECTION) is None


MACHINE = {
    "gpus": [],
    "driver": "",
    "packages": {"torch": "2"},
    "python": "3.12",
    "commit": "",
    "sources": "abc",
    "missing": [],
}


@pytest.fixture
def machine(monkeypatch):
    machine = dict(MACHINE)
    monkeypatch.setattr(command, "describe_machine", lambda _: machine)
    return machine


def call(monkeypatch, tmp_path, statuses, *flags):
    """Call the command with sections that end as told; return its exit status and results."""

    def document(self, section, *, again=False):
        status = statuses.get(section.name, "passed")
        problems = ["[bold] wrong"] if status == "failed" else []
        return {
            "status": status, "seconds": 1.0, "headline": "told", "problems": problems,
            "skipped": None, "figures": {}, "basis": self.basis,
        }  # fmt: skip

    monkeypatch.setattr(Run, "document", document)
    status = command.main(["--out", str(tmp_path), *flags])
    path = tmp_path / "results.json"
    return status, json.loads(path.read_text()) if path.exists() else None


def test_all_sections_are_in_one_file(monkeypatch, tmp_path, machine, capsys):
    status, results = call(monkeypatch, tmp_path, {})
    assert status == 0
    assert list(results["sections"]) == [section.name for section in SECTIONS]
    assert results["machine"] == machine
    assert "told" in capsys.readouterr().out


def test_a_failure_is_told_and_does_not_stop_the_others(monkeypatch, tmp_path, machine, capsys):
    status, results = call(monkeypatch, tmp_path, {"reference": "failed"})
    assert status == 1
    assert results["sections"]["golden"]["status"] == "passed"
    assert "[bold] wrong" in capsys.readouterr().out


def test_what_was_not_run_is_no_failure(monkeypatch, tmp_path, machine):
    assert call(monkeypatch, tmp_path, {"golden": "not run"})[0] == 0
    nothing = {section.name: "not run" for section in SECTIONS}
    assert call(monkeypatch, tmp_path, nothing)[0] == 2


def test_only_what_is_asked_for_runs(monkeypatch, tmp_path, machine):
    _, results = call(monkeypatch, tmp_path, {}, "--only", "memory", "golden")
    assert list(results["sections"]) == ["memory", "golden"]


def test_missing_packages_are_named(monkeypatch, tmp_path, machine, capsys):
    machine["missing"] = ["megatron-core"]
    assert call(monkeypatch, tmp_path, {})[0] == 2
    assert "missing packages: megatron-core" in capsys.readouterr().err


def test_the_table_of_back_ends_has_what_could_not_be_measured(capsys):
    row = {"backend": "syrk", "algorithm": "standard", "matrices": "1 x 2 x 3", "note": "absent"}
    found = {
        "status": "passed", "seconds": 1.0, "headline": "", "skipped": None,
        "figures": {"rows": [row | {"precision": "medium"}]},
    }  # fmt: skip
    report.show(MACHINE, {"newton_schulz": found})
    assert "1 x 2 x 3" in capsys.readouterr().out


def test_the_script_explains_itself_without_any_package(tmp_path):
    # a Python that finds no site-packages
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python")}
    script = str(ROOT / "scripts" / "gpu_check.sh")
    done = subprocess.run(
        [script, "--help"], env=environment, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert all(section.name in done.stdout for section in SECTIONS)
    assert "--wheels" in done.stdout


def wheel(folder: Path) -> None:
    """Write a wheel with one module."""
    base = "tiny_package-1.0"
    with zipfile.ZipFile(folder / f"{base}-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_package.py", "VALUE = 7\n")
        metadata = "Metadata-Version: 2.1\nName: tiny-package\nVersion: 1.0\n"
        archive.writestr(f"{base}.dist-info/METADATA", f"{metadata}Requires-Dist: not-there\n")
        tags = "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{base}.dist-info/WHEEL", tags)
        archive.writestr(f"{base}.dist-info/RECORD", "")


@pytest.mark.long
def test_wheels_are_put_beside_the_results(tmp_path):
    with pytest.raises(WheelsError, match=r"no file there ends in \.whl"):
        install(tmp_path, tmp_path / "site")
    wheel(tmp_path)
    install(tmp_path, tmp_path / "site")
    environment = command.environment_of(tmp_path)
    assert environment["PYTHONPATH"].split(os.pathsep)[:2] == [str(ROOT), str(tmp_path / "site")]
    code = "import tiny_package; print(tiny_package.VALUE)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "7\n"
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no archive")
    with pytest.raises(WheelsError, match="--wheels"):
        install(tmp_path, tmp_path / "site")
