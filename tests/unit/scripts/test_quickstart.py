"""What the quickstart shows of a training, and checks before it."""

import argparse
import io
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from scripts import quickstart


def test_the_validation_set_is_held_out_and_not_the_test_set(tmp_path, capsys):
    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for step in (1, 2):
            writer.add_scalar("lm loss", 5.0 - step, step)
        for loss in (3.25, 3.5, 9.0):
            writer.add_scalar("lm loss validation", loss, 2)
    quickstart.report(tmp_path, "adam", "./scripts/quickstart.sh")
    assert "Held-out loss: 3.2500 (nats per byte, step 2)" in capsys.readouterr().out
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    ("given", "other", "expected"),
    [
        ("--lr 1e-3", "adam", "--lr 1e-3 --optimizer adam"),
        ("--optimizer soap --lr 1e-3", "adam", "--lr 1e-3 --optimizer adam"),
        ("--optimizer=adaptive_muon", "adam", "--optimizer adam"),
        ("--optimizer adam --lr 1e-3", "muon", "--lr 1e-3 --optimizer muon"),
        ("--optimizer-cpu-offload", "adam", "--optimizer-cpu-offload --optimizer adam"),
    ],
)
def test_the_next_command_repeats_the_flags_with_another_optimizer(given, other, expected):
    args = argparse.Namespace(steps=100, processes=2, out=Path("runs/a"))
    command = f"./scripts/quickstart.sh --steps=100 {expected} --out runs/a-{other}"
    assert quickstart.to_compare(args, given.split()) == (other, command)


def test_reasons_are_found_before_the_launchers_report():
    lines = ["usage: ...", "pretrain_gpt.py: error: invalid choice: 'muonn'"] * 2 + ["..."] * 30
    assert quickstart.reasons(lines) == ["pretrain_gpt.py: error: invalid choice: 'muonn'"]


LOG = """\
optimizer.py:29: UserWarning: Apex is not installed.
{steps} validation loss at iteration 20 | lm loss value: 2.602319E+00 | lm loss PPL: 1.3E+01 |
  [2026-01-01] successfully saved checkpoint from iteration      20 to /runs/a [ t 1/1, p 1/1 ]
"""
STEP = " [2026-01-01] iteration {:8d}/      45 | samples: 16 | lm loss: 2.5E+00 | nan: 0 |\n"


def shown(monkeypatch, *, terminal: bool, quiet: bool = False) -> str:
    """Return what is shown of the log above."""
    out = io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", out)
    progress = quickstart.Progress(quiet)
    for line in LOG.format(steps="".join(map(STEP.format, range(1, 46)))).splitlines():
        progress.read(line)
    progress.close()
    return out.getvalue()


def test_a_file_gets_a_line_every_20_steps_and_a_terminal_a_bar(monkeypatch):
    steps = "".join(f"step {n} of 45: loss 2.500, 00:00 left\n" for n in (20, 40, 45))
    events = "step 20: held-out loss 2.602\nstep 20: checkpoint saved\n"
    assert shown(monkeypatch, terminal=False) == steps + events
    assert not shown(monkeypatch, terminal=False, quiet=True)
    screen = shown(monkeypatch, terminal=True)
    for text in ("Training: 100%", "45/45", "step 20: checkpoint saved\n"):
        assert text in screen
    assert "of 45" not in screen + shown(monkeypatch, terminal=True, quiet=True)


def test_fewer_steps_than_the_checkpoint_has_are_refused(tmp_path, monkeypatch, capfd):
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("7\n")
    flags = ["--out", str(tmp_path / "run"), "--steps", "6"]
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        quickstart.main()
    said = capfd.readouterr().err
    assert "--steps=6: must be at least 7" in said
    assert "Give more steps, or another --out." in said
    assert not (tmp_path / "quickstart-corpus").exists()


STARTS = """
import subprocess, sys, time
# as torchrun does
rank = subprocess.Popen(
    [sys.executable, "-c", "import signal, time\\nsignal.signal(15, lambda *_: None)\\n"
     "print('ready', flush=True)\\ntime.sleep(60)"],
    start_new_session=True,
)
rank.wait()
"""


def test_who_stops_at_once_leaves_no_rank_behind():
    launcher = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout.readline() == "ready\n"
    quickstart.stop_gently(launcher)
    assert launcher.poll() is None
    quickstart.stop_at_once(launcher)
    # what a rank that lives on would hold open
    assert launcher.stdout.read() == ""
