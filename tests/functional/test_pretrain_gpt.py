"""The training script at tiny sizes on two CPU processes."""

import re

import pytest

from tests.functional.script import SCRIPT, TINY, losses, start, train
from tests.harness import RankError


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adam", marks=pytest.mark.long)])
def test_trains_with_a_loss_scale(optimizer):
    # float32 and bfloat16, and all layouts, are functional cases
    output = train("--optimizer", optimizer, "--fp16", "--initial-loss-scale", "256")
    values = [float(loss) for loss in losses(output)]
    assert len(values) == 6
    # Mock data repeats a simple pattern: a few steps already learn some of it.
    assert values[-1] < values[0] - 0.05


@pytest.mark.parametrize(
    "storage", [[], pytest.param(["--use-distributed-optimizer"], marks=pytest.mark.long)], ids=len
)
def test_a_run_asks_for_the_rates_of_the_checkpoint(tmp_path, storage):
    flags = ["--optimizer", "muon", *storage, "--lr-decay-iters", "20", "--min-lr", "1e-4"]
    flags += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    first = train(*flags, "--save", str(tmp_path), "--save-interval", "3")
    resume = ["--load", str(tmp_path), "--ckpt-step", "3", "--lr", "0.05", "--min-lr", "0.02"]
    again = train(*flags, *resume, "--use-checkpoint-opt_param-scheduler")
    own = train(*flags, *resume, "--override-opt_param-scheduler")
    assert rates(again) == rates(first)[3:]
    assert losses(again)[-1] == losses(first)[-1]
    assert min(rates(own)) > 0.02


ADAM_BY_PARAMETER = ["--optimizer", "adam", "--dist-ckpt-optim-fully-reshardable", "--bf16"]
MUON = ["--optimizer", "muon"]


@pytest.mark.parametrize(
    "flags",
    [ADAM_BY_PARAMETER, pytest.param(MUON, marks=pytest.mark.long)],
    ids=lambda flags: flags[1],
)
def test_a_run_that_will_save_no_state_loads_all_of_it(tmp_path, flags):
    flags = [*flags, "--use-distributed-optimizer"]
    first = train(*flags, "--save", str(tmp_path), "--save-interval", "3")
    resume = ["--load", str(tmp_path), "--ckpt-step", "3", "--no-save-optim", "--no-save-rng"]
    again = train(*flags, *resume)
    # the trainer prints the mean of a run's first two losses for the second
    assert losses(again)[0::2] == losses(first)[3::2]


def rates(output):
    return [float(rate) for rate in re.findall(r"learning rate: (\S+)", output)]


@pytest.mark.long
def test_two_runs_with_one_seed_print_the_same_losses():
    first, second = (losses(train("--optimizer", "muon")) for _ in range(2))
    assert len(first) == 6
    assert first == second


def test_what_needs_a_gpu_is_refused_with_the_flag():
    with pytest.raises(RankError, match="--context-parallel-size=2: context parallelism is done"):
        train("--context-parallel-size", "2")


@pytest.mark.long
def test_real_starts_print_the_same_losses():
    runs = [start(str(SCRIPT), *TINY, "--optimizer", "muon") for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr[-3000:]
    first, second = (losses(run.stdout) for run in runs)
    assert len(first) == 6
    assert first == second == losses(train("--optimizer", "muon"))


@pytest.mark.long
def test_a_real_start_that_needs_a_gpu_fails_with_the_flag():
    done = start(str(SCRIPT), *TINY, "--context-parallel-size", "2")
    assert done.returncode != 0
    assert "--context-parallel-size=2: context parallelism is done by" in done.stderr
