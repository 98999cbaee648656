"""The sections of the GPU check on a CPU, and what they make of wrong figures."""

import json
import os
import re
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.plan import FIRST, MINUTES, NEEDED, SECTIONS
from benchmarks.gpu_check.profile import split_of
from benchmarks.gpu_check.ranks import CONNECTIONS, ranks_on
from benchmarks.gpu_check.section import outcome_of
from benchmarks.gpu_check.sections import newton_schulz, step
from benchmarks.machine import ROOT
from megatron_eopt.base import kernels
from megatron_eopt.math import passes
from tests.harness import run_ranks
from tests.harness.bare import bare_python
from tests.harness.programs import output_of
from tests.harness.tiers import mostly_long


@pytest.fixture
def context(tmp_path) -> Context:
    return Context("cpu", 2, tmp_path, True, 100.0, run_ranks)


def test_a_section_passes_on_a_cpu(context):
    # the long tier runs all of them
    found = outcome_of("memory", context)
    assert found.status == "passed", found.problems
    assert found.headline
    assert json.loads(json.dumps(found.figures)) == found.figures != {}


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
        assert set(absent) == {"transformer_engine", "gram_newton_schulz"}
        assert all(note.startswith("absent: ") for note in absent.values())
    row = rows[0]
    flops = 5 * (4 * 256 * 64**2 + 2 * 64**3)
    assert row["tflops"] == pytest.approx(flops / row["milliseconds"] / 1e9)


USUAL = ["step", "replay"]
OTHERS = [section.name for section in SECTIONS if section.name not in USUAL]
WHEELS = set(NEEDED.values()) - {"torch"}

SMALLER = """
import sys
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.sections import replay, step
step.WARM_UP = 0
(job,) = replay.SMALL_JOBS.values()
replay.SMALL_JOBS = {"smaller": job._replace(scale=job.scale / 16)}
sys.exit(main())
"""
"""The command with less work: its own small sections take a minute each."""


def test_the_page_lists_the_wheels_that_a_bare_machine_needs():
    page = (ROOT / "docs/how_to/clusters.md").read_text()
    (command,) = re.findall(r"pip wheel --no-deps --wheel-dir wheels ((?:.*\\\n)*.*)", page)
    assert {word.partition("==")[0] for word in command.replace("\\", " ").split()} == WHEELS


@pytest.mark.parametrize("sections", mostly_long([USUAL, OTHERS], USUAL), ids=" ".join)
@pytest.mark.timeout(900)
def test_what_runs_on_a_gpu_has_been_rehearsed_on_a_cpu_with_these_wheels_alone(tmp_path, sections):
    python = bare_python(tmp_path / "bare", WHEELS)
    command = [python, "-P", "-c", SMALLER, "--rehearse", "--out", tmp_path, "--only", *sections]
    # without dynamo, as the command does, since to compile others' functions takes a minute
    printed = output_of(*command, PYTHONPATH=str(ROOT), TORCHDYNAMO_DISABLE="1")
    assert printed.count(": passed after ") == len(sections)


def test_the_first_sections_fit_the_time_limit():
    # a quarter of a minute for what describes the machine and for the starts of sections
    assert sum(section.limit_s for section in SECTIONS[:FIRST]) + 15 <= 60 * MINUTES


@pytest.mark.parametrize("backends", [0, 2])
def test_contestants_of_a_step_fit_an_h100(monkeypatch, backends):
    monkeypatch.setattr(step, "arms", lambda: [*step.ARMS, *step.ARMS[:1] * backends])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(78.5 * 2**30), 0))
    assert step._no_room(step.LARGE) is None
    assert step._no_room(step.LARGE | {"layers": 32}) is not None


def test_arms_hold_their_weights_gradients_and_state():
    of_muon, of_adam = (step.bytes_of(arm, step.LARGE) for arm in (step.ARMS[0], step.ARMS[-1]))
    matrices, others = 8 * 11 * 2048**2, 2 * 32768 * 2048
    assert (of_muon, of_adam) == (14 * matrices + 18 * others, 18 * (matrices + others))


def test_a_step_s_time_is_split_by_kind():
    events = [("nvjet_gemm", 0, 40), ("momentum_update", 30, 60)]
    events += [("Memcpy DtoD", 50, 70), ("adam", 90, 100)]
    split = split_of((name, 1e3 * begin, 1e3 * end) for name, begin, end in events)
    assert split == {"products": 40, "passes": 30, "copies": 10, "idle": 20}


def test_kernels_that_cannot_be_built_are_not_compared_with_themselves(context, monkeypatch):
    def fault(family, device):
        return "no C compiler" if family is passes.KERNELS else None

    def problems():
        return outcome_of("kernels", replace(context, device="cuda", outcome=Outcome())).problems

    monkeypatch.setattr(kernels.Family, "fault", fault)
    assert problems() == [f"{passes.KERNELS.name}: no C compiler"]
    monkeypatch.setenv(kernels.SWITCH, "0")
    assert problems() == ["MEGATRON_EOPT_KERNELS=0 turns all kernels off"]


@pytest.mark.long
def test_a_rank_has_its_own_process_where_cuda_must_read_its_settings_anew(monkeypatch):
    monkeypatch.setenv(CONNECTIONS, "1")
    on_ranks = ranks_on("cpu")
    monkeypatch.setenv(CONNECTIONS, "8")
    assert on_ranks(1, os.getpid) != [os.getpid()]


def test_waits_of_the_host_are_problems_but_for_adaptive_muons_norm(context):
    waits = {"gradients.read": 3, "engine.py:7 run": 1}
    found = outcome_of("no_sync", replace(context, on_ranks=lambda *_: [waits], outcome=Outcome()))
    assert len(found.problems) == 5
    assert "adaptive_muon: the host waits 1 times in engine.py:7 run" in found.problems


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_command_runs_all_sections(tmp_path):
    command = [ROOT / "scripts" / "gpu_check.sh", "--out", tmp_path, "--minutes", 13]
    output_of(*command, timeout=880, PYTHON=str(bare_python(tmp_path / "bare", WHEELS)))
    results = json.loads((tmp_path / "results.json").read_text())
    states = {name: found["status"] for name, found in results["sections"].items()}
    assert states == dict.fromkeys((section.name for section in SECTIONS), "passed")
    assert {"torch", "megatron-core"} <= set(results["machine"]["packages"])
