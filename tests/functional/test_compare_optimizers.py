"""The comparison of optimizers: what it chooses, and does not train again."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare_optimizers import trainings
from benchmarks.compare_optimizers.__main__ import main
from benchmarks.compare_optimizers.grid import Run
from benchmarks.compare_optimizers.report import document
from benchmarks.compare_optimizers.summary import common_loss, summaries
from benchmarks.compare_optimizers.trainings import Result, Settings
from benchmarks.quickstart_runs import held_out_losses, seconds_per_step

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(steps=40, processes=1, flags=("--num-layers", "1"))


def result(optimizer: str, lr: float, seed: int, losses: list[float], seconds: float) -> Result:
    held_out = {10 * (number + 1): loss for number, loss in enumerate(losses)}
    return Result(Run(optimizer, lr, seed), held_out, seconds)


@pytest.fixture
def results() -> list[Result]:
    def of(name: str, lr: float, seconds: float, losses: list[float]) -> list[Result]:
        shifts = {1: 0.0, 2: 0.2, 3: -0.1}
        return [
            result(name, lr, seed, [loss + shift for loss in losses], seconds + shift / 10)
            for seed, shift in shifts.items()
        ]

    diverged = Result(Run("muon", 3.0, 3), {10: 5.0}, 0.5, diverged=True)
    return [
        *of("adam", 1.0, 0.4, [4.0, 3.5, 3.25, 3.0]),
        *of("adam", 2.0, 0.4, [4.5, 4.0, 3.75, 3.5]),
        *of("muon", 1.0, 0.5, [4.0, 3.6, 3.3, 3.1]),
        *of("muon", 2.0, 0.5, [4.0, 3.2, 2.8, 2.5]),
        *of("muon", 3.0, 0.5, [4.0, 3.0, 2.5, 2.0])[:2],
        diverged,
    ]


GRID = {"adam": (1.0, 2.0), "muon": (1.0, 2.0, 3.0)}


def test_the_best_median_of_each_grid_is_taken(results):
    # of seeds 1 and 2 at 3.0 losses are better, but with the diverged one the median is 2.2
    found = summaries(GRID, results)
    assert {name: s.best.lr for name, s in found.items()} == {"adam": 1.0, "muon": 3.0}
    assert found["muon"].best.median == pytest.approx(2.2)
    assert found["adam"].best.median == pytest.approx(3.0)
    assert found["adam"].best.range == pytest.approx((2.9, 3.2))
    assert found["adam"].step_seconds == pytest.approx(0.39)
    assert [s.at_edge for s in found.values()] == [True, True]
    # a second seed that diverges makes it worthless
    results[-2] = Result(Run("muon", 3.0, 2), {}, math.nan, diverged=True)
    found = summaries(GRID, results)
    assert (found["muon"].best.lr, found["muon"].at_edge) == (2.0, False)


def test_time_to_the_loss_that_all_reach(results):
    results[-2] = Result(Run("muon", 3.0, 2), {}, math.nan, diverged=True)
    found = summaries(GRID, results)
    common = common_loss(found)
    assert common == pytest.approx(3.0)
    assert found["adam"].best.steps_to(common) == 40
    assert found["muon"].best.steps_to(common) == pytest.approx(25)
    assert found["muon"].best.steps_to(9.0) == 10
    assert found["muon"].best.steps_to(1.0) == math.inf
    entry = document(SETTINGS, found, results)["optimizers"]["muon"]
    assert entry["seconds_to_common_loss"] == pytest.approx(25 * 0.49)


LOG = """
 iteration        1/      20 | elapsed time per iteration (ms): 9000.0 | lm loss: 5.5E+00 |
 iteration        2/      20 | elapsed time per iteration (ms): 300.0 | lm loss: 5.4E+00 |
 validation loss at iteration 10 | lm loss value: 3.5E+00 | lm loss PPL: 1.4E+01 |
 iteration       19/      20 | elapsed time per iteration (ms): 100.0 | lm loss: 3.4E+00 |
 iteration       20/      20 | elapsed time per iteration (ms): 200.0 | lm loss: 3.3E+00 |
 validation loss at iteration 20 | lm loss value: 3.25E+00 | lm loss PPL: 1.4E+01 |
 validation loss at iteration 20 on validation set | lm loss value: 3.0E+00 | lm loss PPL: 9.3 |
 validation loss at iteration 20 on test set | lm loss value: 2.0E+00 | lm loss PPL: 9.2E+00 |
"""


def test_a_log_is_read(tmp_path):
    assert held_out_losses(tmp_path) == {}
    (tmp_path / "training.log").write_text(LOG)
    assert held_out_losses(tmp_path) == {10: 3.5, 20: 3.0}
    assert seconds_per_step(tmp_path) == pytest.approx(0.2)


class Trainer:
    """Stands for training: writes a log, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.stop_at = ""

    def __call__(self, folder: Path, steps: int, flags: list[str], processes: int) -> None:
        if folder.name == self.stop_at:
            raise KeyboardInterrupt
        self.runs.append(folder.name)
        folder.mkdir(exist_ok=True)
        (folder / "training.log").write_text(LOG)


@pytest.fixture
def trainer(monkeypatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(trainings, "train", trainer)
    return trainer


def test_finished_runs_are_not_trained_again(trainer, tmp_path, capsys):
    command = ["--lr", "adam=1e-3", "muon=1e-3", "--seeds", "1", "2", "--out", str(tmp_path)]
    command += ["--steps", "20"]
    trainer.stop_at = "adam-0.001-2"
    assert main(command) == 130
    assert "goes on" in capsys.readouterr().out
    assert trainer.runs == ["adam-0.001-1", "muon-0.001-1"]
    trainer.stop_at = ""
    assert main(command) == 0
    assert trainer.runs == ["adam-0.001-1", "muon-0.001-1", "adam-0.001-2", "muon-0.001-2"]
    said = capsys.readouterr().out
    assert "adam: learning rates 0.001\nmuon: learning rates 0.001\n" in said
    assert json.loads((tmp_path / "comparison.json").read_text())["common_loss"] == 3.0
    assert (tmp_path / "comparison.png").exists()
    # with other settings nothing may follow
    assert main([*command, "--steps", "30"]) == 2
    assert "has runs of --steps 20 --processes 2; give these" in capsys.readouterr().err
    assert len(trainer.runs) == 4


@pytest.mark.long
def test_two_optimizers_are_trained_and_compared(tmp_path):
    command = [sys.executable, "-m", "benchmarks.compare_optimizers", "--out", str(tmp_path)]
    command += ["--seeds", "1", "--steps", "4", "--processes", "1"]
    command += ["--lr", "adam=1e-3,2e-3", "muon=1e-3", "--muon-fp32-matmul-prec", "highest"]
    command += ["--num-layers", "1", "--hidden-size", "64", "--ffn-hidden-size", "128"]
    environment = {**os.environ, "MEGATRON_EOPT_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, env=environment, text=True, capture_output=True, timeout=400, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    read = json.loads((tmp_path / "comparison.json").read_text())
    assert [run["optimizer"] for run in read["runs"]] == ["adam", "muon", "adam"]
    for run in read["runs"]:
        assert list(run["held_out"]) == ["1", "2", "3", "4"]
        assert run["held_out"]["4"] < run["held_out"]["1"] < 6
        assert run["median_seconds_per_step"] > 0
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    assert not list(tmp_path.glob("*/checkpoints"))
