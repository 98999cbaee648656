"""The quickstart as a newcomer runs it, at a tiny size: interrupted, gone on with, finished."""

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--num-layers", "1", "--hidden-size", "64", "--ffn-hidden-size", "128"]


def command(out: Path, steps: int) -> list[str]:
    script = str(ROOT / "scripts" / "quickstart.py")
    return [sys.executable, script, "--steps", str(steps), "--out", str(out), *SMALL]


def run(out: Path, steps: int, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the quickstart to its end."""
    return subprocess.run(
        command(out, steps), env=environment, text=True, capture_output=True, timeout=180, cwd=ROOT
    )


LISTING = "GPU 0: one\nGPU 1: another\n"


@pytest.mark.parametrize(
    ("chosen", "processes", "expected"),
    [(None, 1, True), (None, 2, True), (None, 3, False), ("cpu", 1, False), ("cuda", 3, True)],
)
def test_gpus_are_used_where_each_process_has_one(
    chosen, processes, expected, tmp_path, monkeypatch
):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{LISTING}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("MEGATRON_EOPT_DEVICE", raising=False)
    if chosen is not None:
        monkeypatch.setenv("MEGATRON_EOPT_DEVICE", chosen)
    script = runpy.run_path(str(ROOT / "scripts" / "quickstart.py"))
    assert script["on_gpu"](processes) is expected


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    return {**os.environ, "MEGATRON_EOPT_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"}


@pytest.mark.long
def test_interrupted_and_gone_on_with(tmp_path, environment):
    out = tmp_path / "run"
    # Many steps, so that the interruption falls into training.
    started = subprocess.Popen(
        command(out, 2000), env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, cwd=ROOT,
    )  # fmt: skip
    lines = []
    for line in started.stdout:
        lines.append(line)
        if re.search(r"iteration +5/", line):
            started.send_signal(signal.SIGINT)
    assert started.wait(timeout=60) == 130
    output = "".join(lines)
    assert "successfully saved checkpoint" in output
    assert "Traceback" not in output
    saved = int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())

    steps = saved + 4
    done = run(out, steps, environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    iterations = [int(i) for i in re.findall(r"iteration +(\d+)/", done.stdout)]
    assert min(iterations) == saved + 1
    assert max(iterations) == steps
    assert re.search(r"Held-out loss: \d+\.\d+", done.stdout)
    assert (out / "loss.png").stat().st_size > 10_000

    # evaluates again, and trains no more
    done = run(out, steps, environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not re.search(r"iteration +\d+/", done.stdout)
    assert re.search(rf"Held-out loss: \d+\.\d+ .*step {steps}\)", done.stdout)
