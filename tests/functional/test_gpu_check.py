"""The sections of the GPU check on a CPU, and what they make of wrong figures."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.plan import SECTIONS
from benchmarks.gpu_check.ranks import ranks_on
from benchmarks.gpu_check.section import outcome_of
from benchmarks.gpu_check.sections import golden, layouts, memory, newton_schulz, quickstart, step
from benchmarks.machine import ROOT
from tests.functional.golden import read
from tests.harness import run_ranks


@pytest.fixture
def context(tmp_path) -> Context:
    return Context("cpu", 2, tmp_path, True, 100.0, run_ranks)


@pytest.mark.parametrize(
    "name",
    [
        "memory",
        # other tests do what these do
        pytest.param("reference", marks=pytest.mark.long),
        pytest.param("layouts", marks=pytest.mark.long),
        pytest.param("no_sync", marks=pytest.mark.long),
        pytest.param("step", marks=pytest.mark.long),
        pytest.param("golden", marks=pytest.mark.long),
        pytest.param("quickstart", marks=pytest.mark.long),
    ],
)
def test_passes_on_a_cpu(name, context):
    found = outcome_of(name, context)
    assert found.status == "passed", found.problems
    assert found.headline
    assert json.loads(json.dumps(found.figures)) == found.figures
    assert found.figures


def test_graphs_are_skipped_on_a_cpu(context):
    found = outcome_of("cuda_graph", context)
    assert (found.status, found.skipped) == ("skipped", "a CPU has no CUDA graphs")


def test_every_back_end_has_its_row(context, monkeypatch):
    monkeypatch.setattr(newton_schulz, "ROW_S", 0.0)
    found = outcome_of("newton_schulz", context)
    assert found.status == "passed", found.problems
    rows = found.figures["rows"]
    for stack in map(str, newton_schulz.SMALL):
        mine = [row for row in rows if row["matrices"] == stack]
        timed = {(row["backend"], row["algorithm"]) for row in mine if "milliseconds" in row}
        own = {("torch", "standard"), ("torch", "gram"), ("emerging_optimizers", "standard")}
        assert timed == own
        absent = {row["backend"]: row["note"] for row in mine if "milliseconds" not in row}
        assert set(absent) == {"syrk", "transformer_engine", "gram_newton_schulz"}
        assert all(note.startswith("absent: ") for note in absent.values())
    row = rows[0]
    flops = 5 * (4 * 256 * 64**2 + 2 * 64**3)
    assert row["tflops"] == pytest.approx(flops / row["milliseconds"] / 1e9)


def test_a_back_end_that_is_wrong_or_breaks_is_a_problem(context, monkeypatch):
    monkeypatch.setattr(newton_schulz, "ROW_S", 0.0)
    monkeypatch.setattr(newton_schulz, "SMALL", newton_schulz.SMALL[:1])
    monkeypatch.setattr(newton_schulz, "TOLERANCES", {"highest": 1e-9})
    found = newton_schulz.run(context)
    assert len(found.problems) == 3
    assert "torch standard on 1 x 64 x 256: deviates by" in found.problems[0]

    def breaks(*_, **__):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(newton_schulz, "milliseconds_of", breaks)
    found = newton_schulz.run(context)
    assert all("RuntimeError: no such kernel" in problem for problem in found.problems)
    assert len(found.figures["rows"]) == 6


def test_a_row_ends_when_time_is_up(context, monkeypatch):
    monkeypatch.setattr(newton_schulz, "milliseconds_of", lambda _: time.sleep(60))
    began, handler = time.monotonic(), signal.getsignal(signal.SIGALRM)
    x = torch.randn(1, 4, 8)
    row = newton_schulz.figures("torch", "standard", "highest", x, x, began + 0.2)
    assert time.monotonic() - began < 30
    assert list(row) == ["note"]
    assert row["note"].startswith("not measured: ")
    assert signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize("difference", [0.0, 0.06, math.nan])
def test_the_same_iteration_must_give_the_same_weights(context, difference):
    times = {arm.name: [2.0, 4.0, 3.0] for arm in step.ARMS}
    found = outcome_of("step", canned(context, [{"times": times, "difference": difference}]))
    assert found.status == ("passed" if difference == 0 else "failed")
    assert found.figures["milliseconds"] == dict.fromkeys(times, 3.0)


def canned(context: Context, results: list) -> Context:
    return replace(context, on_ranks=lambda *_: results)


@pytest.mark.parametrize("error", [1.0, math.nan])
def test_a_step_that_deviates_is_a_problem(context, error):
    found = outcome_of("reference", canned(context, [{"a": 1e-7, "b": error}]))
    assert len(found.problems) == 2
    assert all(": b deviates by" in problem for problem in found.problems)


def test_waits_of_the_host_are_problems_but_for_the_norm(context):
    waits = {"get_grad_norm_fp32": 3, "megatron_eopt/optimizers/engine.py:7 run": 1}
    found = outcome_of("no_sync", canned(context, [waits]))
    assert [problem.partition(":")[2] for problem in found.problems] == [
        " the host waits 1 times in megatron_eopt/optimizers/engine.py:7 run"
    ] * 3


def test_an_exception_leaves_what_other_parts_found(context):
    calls = []

    def fails_once(*_):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("lost")
        return [{"get_grad_norm_fp32": 1}]

    found = outcome_of("no_sync", replace(context, on_ranks=fails_once))
    assert found.problems == ["muon: RuntimeError: lost"]
    assert set(found.figures) == {"adaptive_muon", "adam"}


def test_measurements_may_stray_from_counts_by_a_share_and_a_slack():
    counted = {"counted peak": 1000, "counted standing": 1000, "standing": None}
    assert not memory.wrong({**counted, "peak": 1240}, 100)
    for peak in (1260, 740):
        assert memory.wrong({**counted, "peak": peak}, 100)


def test_layouts_are_those_that_ranks_allow():
    assert list(layouts.cases_of(1)) == ["TP 1 x DP 1, plain", "TP 1 x DP 1, sharded"]
    assert len(layouts.cases_of(8)) == 6


LINE = "iteration {}/ 3 | elapsed time per iteration (ms): 12.5 | lm loss: {} |\n"


@pytest.mark.parametrize(
    ("losses", "problem"),
    [
        (("6.0", "5.0", "4.0"), None),
        (("6.0", "5.0", "5.9"), "the loss went from 6.0000 to 5.9000"),
        (("6.0", "5.0", "nan"), "the loss went from 6.0000 to nan"),
        (("6.0", "5.0"), "3 steps were asked for, 2 are in the log"),
    ],
)
def test_losses_must_fall(losses, problem):
    log = "".join(LINE.format(number, loss) for number, loss in enumerate(losses, 1))
    found = quickstart.judged(log, 3)
    assert found.problems == ([problem] if problem else [])


def test_what_is_not_committed_is_recorded(context, monkeypatch):
    (case,) = golden.cases_of("cpu_gloo", 1, small=True)
    assert case.name == golden.ON_CPU
    kept = read(case, "cpu_gloo")
    monkeypatch.setattr(golden, "run_measured", lambda *_: kept["metrics"])
    assert golden._take(case, "cpu_gloo", context, Outcome()).endswith("as committed")
    moved = {**kept["metrics"], "lm loss": [9.0] * 6}
    monkeypatch.setattr(golden, "run_measured", lambda *_: moved)
    outcome = Outcome()
    golden._take(case, "cpu_gloo", context, outcome)
    assert outcome.status == "failed"
    monkeypatch.setattr(golden.golden, "FOLDER", context.folder)
    monkeypatch.setattr(golden.golden.path_of, "__defaults__", (context.folder,))
    outcome = Outcome()
    assert "recorded" in golden._take(case, "cpu_gloo", context, outcome)
    assert outcome.figures[case.name]["recorded"]["metrics"] == moved
    assert read(case, "cpu_gloo", context.folder)["metrics"] == moved


def rank_and_device() -> tuple[int, str]:
    import torch.distributed as dist

    return dist.get_rank(), str(torch.zeros(1, device="cuda").device)


@pytest.mark.long
def test_ranks_are_processes_with_the_device():
    assert ranks_on("cpu")(2, rank_and_device) == [(0, "cpu"), (1, "cpu")]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_command_runs_all_sections(tmp_path):
    command = [str(ROOT / "scripts" / "gpu_check.sh"), "--out", str(tmp_path), "--minutes", "13"]
    environment = {**os.environ, "MEGATRON_EOPT_DEVICE": "cpu", "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    results = json.loads((Path(tmp_path) / "results.json").read_text())
    states = {name: found["status"] for name, found in results["sections"].items()}
    passing = dict.fromkeys((section.name for section in SECTIONS), "passed")
    assert states == {**passing, "cuda_graph": "skipped"}
    assert {"torch", "megatron-core"} <= set(results["machine"]["packages"])
