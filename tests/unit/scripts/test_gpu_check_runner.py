"""Sections that pass, fail, crash and find no time: what is kept, and what is told."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import section as process
from benchmarks.gpu_check.plan import Section
from benchmarks.gpu_check.runner import GRACE_S, LEAST_S, Run
from benchmarks.predicted import rows

SECTION = Section("quickstart", 20.0, "")
PASSES = """
import json, pathlib, sys
document = {"status": "passed", "headline": "good", "problems": [], "skipped": None, "figures": {}}
pathlib.Path(sys.argv[1], "quickstart.json").write_text(json.dumps(document))
"""
FAILS = PASSES.replace('"passed"', '"failed"').replace("[]", '["it is wrong"]')
PARTLY = PASSES.replace('"figures": {}', '"figures": {"so far": 1}')
STOPS = f"""
import signal, time
signal.signal(signal.SIGTERM, lambda *_: exit(exec({PARTLY!r})))
time.sleep(100)
"""
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
    return Scripted(tmp_path, time.monotonic() + 300, "cpu", 2, True, basis, dict(os.environ))


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
    assert replace(run, script=FAILS).document(SECTION)["problems"] == ["it is wrong"]
    assert run.document(SECTION)["status"] == "passed"


def test_a_crash_is_a_failure_with_its_last_lines(run):
    found = replace(run, script=CRASHES).document(SECTION)
    assert (found["status"], found["problems"]) == ("failed", ["ended with exit code -11"])
    assert found["log"] == ["the last words"]


def test_without_time_a_section_is_not_run(run):
    late = replace(run, deadline=time.monotonic() + LEAST_S / 2)
    assert late.document(SECTION)["status"] == "not run"
    assert run.calls == 0


@pytest.mark.parametrize(("left", "status"), [(300, "failed"), (GRACE_S + 2, "not run")])
def test_a_section_that_is_stopped_leaves_its_figures(run, left, status, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_check.runner.LEAST_S", 0)
    slow = replace(run, script=STOPS, deadline=time.monotonic() + left)
    found = slow.document(SECTION._replace(limit_s=GRACE_S + 3))
    assert (found["status"], found["figures"]) == (status, {"so far": 1})


def test_a_section_writes_what_it_has_when_it_is_told_to_end(tmp_path, monkeypatch):
    def endless(context):
        context.outcome.figures["so far"] = 1
        with context.outcome.noting("nothing"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(100)

    modules = SimpleNamespace(import_module=lambda _: SimpleNamespace(run=endless))
    monkeypatch.setattr(process, "importlib", modules)
    options = ["--out", str(tmp_path), "--device", "cpu", "--ranks", "1", "--seconds", "9"]
    monkeypatch.setattr(sys, "argv", ["section", "quickstart", *options])
    before = signal.getsignal(signal.SIGTERM)
    try:
        process.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    found = json.loads((tmp_path / "quickstart.json").read_text())
    assert (found["figures"], found["problems"]) == ({"so far": 1}, [])


def test_results_go_where_they_are_wanted_and_the_status_says_what_did_not_run(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MEGATRON_EOPT_DEVICE", "cpu")
    results = tmp_path / "elsewhere" / "found.json"
    options = ["--out", str(tmp_path), "--results", str(results), "--minutes", "0.01"]
    assert command.main([*options, "--only", "kernels"]) == 2
    assert json.loads(results.read_text())["sections"]["kernels"]["status"] == "not run"


def test_predictions_stand_beside_what_was_measured():
    split = {"products": 13.0, "passes": 4.0, "copies": 0.5, "idle": 1.0}
    of_step = {"milliseconds": {"muon": 18.5}, "split": split}
    seconds = {"step": 0.003, "products": 0.002, "passes": 0.0005, "copies": 0.0001}
    planned = {"step": 0.0025, "products": 0.0018, "elements": 0.0004}
    other = {"seconds": {"step": 0.004}}
    of_replay = {"planned": planned, "seconds": seconds, "adam": other, "stock": {"left_out": "-"}}
    sections = {"step": of_step | {"16 query groups": of_step}, "replay": {"a job": of_replay}}
    assert rows({}) == rows({"step": {"figures": {}}}) == []
    found = rows({name: {"figures": figures} for name, figures in sections.items()})
    titles = dict.fromkeys(title for title, *_ in found)
    assert [*titles] == ["Muon's step, 8 query groups", "Muon's step, 16 query groups", "a job"]
    parts = {part: (predicted, real) for title, part, predicted, real in found if title == "a job"}
    assert parts == {
        "products": ("1.80", "2.00"),
        "passes and copies": ("0.40", "0.60"),
        "step": ("2.50", "3.00"),
        "step, Adam": ("", "4.00"),
    }
    whole = {part: (float(predicted or 0), float(real)) for _, part, predicted, real in found[:5]}
    assert whole["step"][1] == 18.5
    sum_of_parts = sum(whole[part][0] for part in ("products", "passes", "copies"))
    assert whole["step"][0] == pytest.approx(sum_of_parts, abs=0.2)
