"""The comparison of optimizers: what it chooses, and what it says of it."""

import json
import math
import sys

import pytest

from benchmarks.compare_optimizers.grid import Run
from benchmarks.compare_optimizers.report import document
from benchmarks.compare_optimizers.summary import common_loss, summaries
from benchmarks.compare_optimizers.trainings import Result, Settings
from tests.functional.test_quickstart import SMALL
from tests.harness.programs import output_of

GRID = {"adam": (1.0, 2.0), "muon": (1.0, 2.0, 3.0)}
SETTINGS = Settings(steps=40, processes=1, flags=("--num-layers", "1"))


@pytest.fixture
def results() -> list[Result]:
    def of(name: str, lr: float, seconds: float, losses: list[float]) -> list[Result]:
        found = []
        for seed, shift in {1: 0.0, 2: 0.2, 3: -0.1}.items():
            held_out = {10 * number: loss + shift for number, loss in enumerate(losses, 1)}
            found.append(Result(Run(name, lr, seed), held_out, seconds + shift / 10))
        return found

    return [
        *of("adam", 1.0, 0.4, [4.0, 3.5, 3.25, 3.0]),
        *of("adam", 2.0, 0.4, [4.5, 4.0, 3.75, 3.5]),
        *of("muon", 1.0, 0.5, [4.0, 3.6, 3.3, 3.1]),
        *of("muon", 2.0, 0.5, [4.0, 3.2, 2.8, 2.5]),
        *of("muon", 3.0, 0.5, [4.0, 3.0, 2.5, 2.0])[:2],
        Result(Run("muon", 3.0, 3), {10: 5.0}, 0.5, diverged=True),
    ]


def test_the_best_median_of_each_grid_is_taken(results):
    # of seeds 1 and 2 at 3.0 losses are better, but with the diverged one the median is 2.2
    found = summaries(GRID, results)
    assert {name: s.best.lr for name, s in found.items()} == {"adam": 1.0, "muon": 3.0}
    assert [s.best.median for s in found.values()] == pytest.approx([3.0, 2.2])
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
    steps = [found["muon"].best.steps_to(loss) for loss in (common, 9.0, 1.0)]
    assert steps == [pytest.approx(25), 10, math.inf]
    entry = document(SETTINGS, found, results)["optimizers"]["muon"]
    assert entry["seconds_to_common_loss"] == pytest.approx(25 * 0.49)


@pytest.mark.long
def test_two_optimizers_are_trained_and_compared(tmp_path):
    command = [sys.executable, "-m", "benchmarks.compare_optimizers", "--out", tmp_path]
    command += ["--seeds", 1, "--steps", 4, "--processes", 1]
    command += ["--lr", "adam=1e-3,2e-3", "muon=1e-3", "--muon-fp32-matmul-prec", "highest"]
    output_of(*command, *SMALL, timeout=400)
    read = json.loads((tmp_path / "comparison.json").read_text())
    assert [run["optimizer"] for run in read["runs"]] == ["adam", "muon", "adam"]
    for run in read["runs"]:
        assert list(run["held_out"]) == ["1", "2", "3", "4"]
        assert run["held_out"]["4"] < run["held_out"]["1"] < 6
        assert run["median_seconds_per_step"] > 0
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    assert not list(tmp_path.glob("*/checkpoints"))
