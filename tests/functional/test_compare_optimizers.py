"""The comparison of optimizers: what it refuses, chooses, draws and does not train again."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compare_optimizers import trainings
from benchmarks.compare_optimizers.__main__ import main
from benchmarks.compare_optimizers.grid import LEARNING_RATES, Run, grid_of, runs_of
from benchmarks.compare_optimizers.report import document, draw, notes, table
from benchmarks.compare_optimizers.summary import common_loss, summaries
from benchmarks.compare_optimizers.trainings import Result, Settings
from benchmarks.quickstart_runs import RunError, held_out_losses, seconds_per_step

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = Settings(steps=40, processes=1, flags=("--num-layers", "1"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--optimizers muonn", "--optimizers muonn: must be one of adam, "),
        ("--optimizers", "--optimizers: name at least one of adam, "),
        ("--optimizers muon muon", "--optimizers muon muon: name each of them once"),
        ("--seeds", "--seeds: give at least one whole number"),
        ("--seeds 0", "--seeds 0: must be at least 1"),
        ("--seeds 2 2", "--seeds 2 2: name each of them once"),
        ("--steps 0", "--steps 0: must be at least 1"),
        ("--processes 0", "--processes 0: must be at least 1"),
        ("--png nowhere/a.png", "--png nowhere/a.png: must be a file in a folder that exists"),
        ("--json .", "--json .: must be a file in a folder that exists"),
        ("--lr 1e-3", "--lr 1e-3: must be OPTIMIZER=a,b,c"),
        ("--lr soap=1e-3", "--lr soap=1e-3: must name one of --optimizers adam muon"),
        ("--lr muon=1e-3,fast", "--lr muon=1e-3,fast: learning rates must be numbers"),
        ("--lr muon=", "--lr muon=: learning rates must be numbers"),
        ("--lr muon=1e-3,-1", "--lr muon=1e-3,-1: learning rates must be finite and above 0"),
        ("--lr muon=nan", "--lr muon=nan: learning rates must be finite and above 0"),
        ("--lr muon=1e-3,0.001", "--lr muon=1e-3,0.001: name each learning rate once"),
        ("--lr muon=1e-3 muon=1", "--lr muon=1: muon has learning rates already"),
        ("--optimizer muon", "--optimizer: is set for each run"),
        ("--seed=3", "--seed: is set for each run"),
        ("--eval-iters 0", "--eval-iters: is set for each run"),
        ("--png figure", "--png figure: must end in .png"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trainings, "train", lambda *_: pytest.fail("it trained"))
    assert main([*arguments.split(), "--out", str(tmp_path / "runs")]) == 2
    # torch may have something to say beside it
    lines = capsys.readouterr().err.splitlines()
    (error,) = (line for line in lines if line.startswith("./scripts/compare_optimizers.sh: "))
    assert said in error
    assert error == lines[-1]
    assert not (tmp_path / "runs").exists()


def test_an_unknown_device_and_a_folder_in_the_way_are_refused(tmp_path, capsys, monkeypatch):
    (tmp_path / "runs").write_text("")
    assert main(["--out", str(tmp_path / "runs")]) == 2
    assert "runs" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setenv("MEGATRON_EOPT_DEVICE", "tpu")
    assert main(["--out", str(tmp_path / "others")]) == 2
    assert "MEGATRON_EOPT_DEVICE='tpu'" in capsys.readouterr().err.splitlines()[-1]


def test_what_is_no_number_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--seeds", "one"])
    assert "argument --seeds: invalid int value: 'one'" in capsys.readouterr().err


def test_every_optimizer_has_the_default_grid_unless_given_its_own():
    grid = grid_of(["adam", "muon", "lion"], ["lion=4e-4,1e-4"])
    assert grid == {"adam": LEARNING_RATES, "muon": LEARNING_RATES, "lion": (1e-4, 4e-4)}
    runs = list(runs_of(grid, [1, 2]))
    assert len(set(runs)) == len(runs) == 2 * (2 * len(LEARNING_RATES) + 2)
    # in turn
    assert [run.optimizer for run in runs[:4]] == ["adam", "muon", "lion", "adam"]


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


def test_the_document_has_all_and_is_json(results):
    text = json.dumps(document(SETTINGS, summaries(GRID, results), results), allow_nan=False)
    read = json.loads(text)
    assert len(read["runs"]) == len(results)
    assert read["grid"] == {name: list(rates) for name, rates in GRID.items()}
    assert read["optimizers"]["muon"]["median_of_grid"]["2"] == pytest.approx(2.5)
    assert sum(run["diverged"] for run in read["runs"]) == 1


def test_the_figure_has_medians_and_bands_of_the_best(results, tmp_path):
    found = summaries(GRID, results)
    figure = draw(SETTINGS, found)
    steps, times = figure.axes
    assert [line.get_label() for line in steps.lines] == [
        "adam, lr 1 of 1, 2",
        "muon, lr 3 of 1, 2, 3",
    ]
    adam = steps.lines[0]
    assert list(adam.get_xdata()) == [10, 20, 30, 40]
    assert list(adam.get_ydata()) == pytest.approx([4.0, 3.5, 3.25, 3.0])
    assert list(times.lines[0].get_xdata()) == pytest.approx([3.9, 7.8, 11.7, 15.6])
    band = steps.collections[0].get_datalim(steps.transData)
    assert (band.y0, band.y1) == pytest.approx((2.9, 4.2))
    title = figure.get_suptitle()
    assert "40 steps on 1 process;" in title
    assert "seeds 1, 2, 3" in title
    assert "--num-layers 1" in title
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_table_has_the_whole_grid(results, capsys):
    from rich.console import Console

    found = summaries(GRID, results)
    Console(width=80).print(table(found))
    text = capsys.readouterr().out
    rows = [line for line in text.splitlines() if " adam " in line or " muon " in line]
    assert len(rows) == 5
    assert [" * " in row for row in rows] == [True, False, False, False, True]
    assert "2.0000 .. -  " in rows[-1]
    assert "…" not in text
    assert "until the median is 3.0000" in text
    assert "muon, 3: 1 of 3 runs diverged." in notes(found)


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
        self.output = LOG

    def __call__(self, folder: Path, steps: int, flags: list[str], processes: int) -> None:
        if folder.name == self.stop_at:
            raise KeyboardInterrupt
        self.runs.append(folder.name)
        folder.mkdir(exist_ok=True)
        (folder / "training.log").write_text(self.output)
        if self.output is not LOG:
            raise RunError("it failed")


@pytest.fixture
def trainer(monkeypatch) -> Trainer:
    trainer = Trainer()
    monkeypatch.setattr(trainings, "train", trainer)
    return trainer


def test_finished_runs_are_not_trained_again(trainer, tmp_path, capsys, monkeypatch):
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
    # of a later commit nothing was trained
    monkeypatch.setattr(trainings, "commit", lambda: "later")
    assert main(command) == 0
    assert "later" not in json.loads((tmp_path / "comparison.json").read_text())["about"]["commit"]
    # more seeds may follow, with other settings nothing may
    assert main([*command, "--seeds", "3"]) == 0
    assert len(trainer.runs) == 6
    assert "later" in json.loads((tmp_path / "comparison.json").read_text())["about"]["commit"]
    assert main([*command, "--steps", "30"]) == 2
    assert "has runs of --steps 20 --processes 2; give these" in capsys.readouterr().err
    assert main([*command, "--num-layers", "1"]) == 2
    assert len(trainer.runs) == 6


def test_a_run_that_diverges_is_a_result_and_one_that_fails_is_none(trainer, tmp_path, capsys):
    command = ["--optimizers", "sgd", "--lr", "sgd=1e9", "--seeds", "1", "--out", str(tmp_path)]
    trainer.output = "ImportError: no module\n"
    assert main(command) == 1
    assert "it failed" in capsys.readouterr().err
    # nothing was trained with these flags that others could be mistaken for
    assert main([*command, "--steps", "30"]) == 1
    trainer.output = "AssertionError: found NaN in local grad norm\n"
    assert main(command) == 0
    assert main(command) == 0
    assert len(trainer.runs) == 3
    assert "sgd, 1e+09: 1 of 1 runs diverged." in capsys.readouterr().out


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


def test_settings_of_another_program_stay_as_they_are(trainer, tmp_path, capsys):
    (tmp_path / "settings.json").write_text('{"editor.fontSize": 14}')
    assert main(["--out", str(tmp_path)]) == 2
    assert "its settings.json is not of such runs" in capsys.readouterr().err
    assert (tmp_path / "settings.json").read_text() == '{"editor.fontSize": 14}'
