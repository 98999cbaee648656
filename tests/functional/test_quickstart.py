"""The quickstart as a newcomer runs it, at a tiny size: interrupted, gone on with, finished."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import quickstart
from tests.harness.programs import ROOT, output_of

EXPECTED = "(Preparing|Using) the corpus|Wrote |Training|The trainer's|step|Interrupted|Stopped"
"""How the lines begin that a newcomer sees."""
SMALL = ["--num-layers", "1", "--hidden-size", "64", "--ffn-hidden-size", "128"]


def command(out: Path, steps: int) -> list[str]:
    script = str(ROOT / "scripts" / "quickstart.py")
    return [sys.executable, script, "--steps", str(steps), "--out", str(out), *SMALL]


@pytest.mark.parametrize(
    ("chosen", "processes", "expected"),
    [(None, 1, True), (None, 2, True), (None, 3, False), ("cpu", 1, False), ("cuda", 3, True)],
)
def test_gpus_are_used_where_each_process_has_one(
    chosen, processes, expected, tmp_path, monkeypatch
):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU 0: one\\nGPU 1: another\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("MEGATRON_EOPT_DEVICE", raising=False)
    if chosen is not None:
        monkeypatch.setenv("MEGATRON_EOPT_DEVICE", chosen)
    assert quickstart.on_gpu(processes) is expected


def test_lines_that_another_process_cuts_into_are_read(capsys):
    progress = quickstart.Progress()
    for loss in ("3.2", "3.2E+00WARNING:root:late", "NAN |", "WARNING:root:late"):
        progress.read(f" [now] iteration       20/      40 | lm loss: {loss}\n")
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0].split()[-1] for line in lines] == ["3.200", "3.200", "nan"]


@pytest.mark.long
def test_interrupted_and_gone_on_with(tmp_path):
    environment = {**os.environ, "MEGATRON_EOPT_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"}
    out = tmp_path / "run"
    # Many steps, so that the interruption falls into training.
    started = subprocess.Popen(
        command(out, 2000), env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, cwd=ROOT,
    )  # fmt: skip
    lines = []
    for line in started.stdout:
        lines.append(line.rstrip())
        if line.startswith("step 20 of 2000: loss "):
            started.send_signal(signal.SIGINT)
    assert started.wait(timeout=60) == 130
    assert not [line for line in lines if not re.match(EXPECTED, line)]
    assert any(re.fullmatch(r"step \d+: checkpoint saved", line) for line in lines)
    saved = int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())

    steps = saved + 4
    log = out / "training.log"
    before = len(log.read_text())
    printed = output_of(*command(out, steps), timeout=180)
    iterations = [int(i) for i in re.findall(r"iteration +(\d+)/", log.read_text()[before:])]
    assert (min(iterations), max(iterations)) == (saved + 1, steps)
    assert f"step {saved}: checkpoint loaded" in printed
    assert f"step {steps} of {steps}: loss " in printed
    assert re.search(r"Held-out loss: \d+\.\d+", printed)
    assert (out / "loss.png").stat().st_size > 10_000

    # evaluates again, and trains no more
    printed = output_of(*command(out, steps), timeout=180)
    assert not re.search(rf" of {steps}: loss", printed)
    assert re.search(rf"Held-out loss: \d+\.\d+ .*step {steps}\)", printed)
