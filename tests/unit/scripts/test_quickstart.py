"""What the quickstart refuses before it trains, and says at its end."""

import signal
import subprocess
import sys

import pytest
from torch.utils.tensorboard import SummaryWriter

from megatron_eopt import ConfigurationError
from scripts import quickstart


def test_the_validation_set_is_held_out_and_not_the_test_set(tmp_path, capsys):
    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        for step in (1, 2):
            writer.add_scalar("lm loss", 5.0 - step, step)
        for loss in (3.25, 3.5, 9.0):
            writer.add_scalar("lm loss validation", loss, 2)
    quickstart.report(tmp_path)
    said = capsys.readouterr().out
    assert "Held-out loss: 3.2500 (nats per byte, step 2)" in said
    assert (tmp_path / "loss.png").exists()


def test_a_run_without_evaluations_is_reported(tmp_path, capsys):
    with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
        writer.add_scalar("lm loss", 4.0, 1)
    quickstart.report(tmp_path)
    said = capsys.readouterr().out
    assert "First training loss: 4.0000" in said
    assert "Held-out" not in said


def test_reasons_are_found_before_the_launchers_report():
    lines = ["usage: ...", "pretrain_gpt.py: error: invalid choice: 'muonn'"] * 2 + ["..."] * 30
    assert quickstart.reasons(lines) == ["pretrain_gpt.py: error: invalid choice: 'muonn'"]


def test_exceptions_without_a_message_are_reasons():
    bare = ["StopIteration", "[rank0]: AssertionError", "torch.cuda.OutOfMemoryError"]
    others = ["raise StopIteration", "  error_file: <N/A>", "no StopIteration"]
    assert quickstart.reasons(others + bare) == bare


def call(monkeypatch, capfd, *arguments: object) -> tuple[int, str]:
    """Call ``main`` as the script does; return its exit code and its errors."""
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *map(str, arguments)])
    try:
        code = quickstart.main()
    except SystemExit as error:
        code = error.code
    return code, capfd.readouterr().err


def test_a_device_that_there_is_not_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MEGATRON_EOPT_DEVICE", "gpu")
    code, said = call(monkeypatch, capfd, "--out", tmp_path / "run")
    assert code == 2
    assert "MEGATRON_EOPT_DEVICE='gpu': must be one of cpu, cuda." in said
    assert not list(tmp_path.iterdir())


@pytest.fixture
def reached(tmp_path):
    """Checkpoints of a run that has done seven steps."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7\n")
    return folder


def test_fewer_steps_than_the_checkpoint_has_are_refused(tmp_path, monkeypatch, capfd, reached):
    code, said = call(monkeypatch, capfd, "--out", tmp_path / "run", "--steps", "6")
    assert code == 2
    assert "--steps=6: must be at least 7" in said
    assert "Give more steps, or another --out." in said
    assert not (tmp_path / "quickstart-corpus").exists()


@pytest.mark.parametrize(
    ("steps", "flags"),
    [(7, []), (6, ["--load", "x"]), (6, ["--load=x"]), (6, ["--finetune"]), (1, ["--ckpt-step=1"])],
)
def test_other_steps_are_not(reached, steps, flags):
    quickstart.check_steps(steps, reached, flags)
    (reached / "latest_checkpointed_iteration.txt").write_text("release")
    quickstart.check_steps(1, reached, [])


def test_own_checkpoints_to_save_do_not_change_where_a_run_begins(reached):
    with pytest.raises(ConfigurationError, match="--steps=6"):
        quickstart.check_steps(6, reached, ["--save", "x"])


@pytest.mark.parametrize("out", ["file", "file/run", "run"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch, capfd, out):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "run" / "training.log").mkdir(parents=True)
    code, said = call(monkeypatch, capfd, "--out", tmp_path / out)
    assert code == 2
    assert f"--out {tmp_path / out}: cannot be written" in said
    assert not (tmp_path / "quickstart-corpus").exists()


def test_a_corpus_that_cannot_be_made_is_told_by_its_own_script(tmp_path, monkeypatch, capfd):
    (tmp_path / "quickstart-corpus").write_text("in the way")
    code, said = call(monkeypatch, capfd, "--out", tmp_path / "run")
    assert code == 2
    assert said.splitlines()[-1].startswith(
        f"prepare_corpus: --out {tmp_path / 'quickstart-corpus'}: is not"
    )
    assert "Traceback" not in said


STARTS_LATE = "import time; time.sleep(60)"
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


def launched(script):
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def test_a_launcher_without_ranks_is_asked_to_end():
    launcher = launched(STARTS_LATE)
    quickstart.stop_gently(launcher)
    assert launcher.wait(10) == -signal.SIGTERM


def test_who_stops_at_once_leaves_no_rank_behind():
    launcher = launched(STARTS)
    assert launcher.stdout.readline() == "ready\n"
    quickstart.stop_gently(launcher)
    assert launcher.poll() is None
    quickstart.stop_at_once(launcher)
    # what a rank that lives on would hold open
    assert launcher.stdout.read() == ""


def test_a_single_step_has_no_warm_up(tmp_path):
    for steps, expected in ((1, "0"), (2, "1"), (360, "20")):
        flags = quickstart.training_flags(steps, 1, tmp_path, tmp_path)
        assert flags[flags.index("--lr-warmup-iters") + 1] == expected
