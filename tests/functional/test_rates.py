"""Learning rates of groups over a resume through the trainer: the checkpoint's or the flags'."""

from pathlib import Path
from unittest import mock

import pytest

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from tests.functional.script import TINY, _run_once
from tests.functional.test_checkpoint_refusals import _error_of
from tests.harness import run_ranks

MUON = [*TINY, *"--optimizer muon --use-distributed-optimizer --lr 1e-3 --min-lr 1e-4".split()]
OWN = ["--muon-lr", "4e-3", "--decoupled-lr", "5e-4", "--decoupled-min-lr", "1e-4"]
OTHERS = ["--lr", "3e-3", "--muon-lr", "2e-3", "--decoupled-lr", "7e-4"]


def rates(flags: list[str]) -> set[tuple[str, float]]:
    """Run the script; return optimizer and largest rate of each group."""
    from megatron.training import training

    found: set[tuple[str, float]] = set()
    original = training.train

    def seen(forward_step, model, optimizer, *rest, **kwargs):
        found.update((group["optimizer"], group["max_lr"]) for group in optimizer.param_groups)
        return original(forward_step, model, optimizer, *rest, **kwargs)

    with mock.patch.object(training, "train", seen):
        _run_once(flags)
    return found


CASES = {
    # further flags of the resumed run: largest rates of Muon, Adam and the decoupled group
    "flags": (["--override-opt_param-scheduler", *OWN, "--muon-lr", "2e-3"], (2e-3, 1e-3, 5e-4)),
    "checkpoint": (["--use-checkpoint-opt_param-scheduler", *OWN[2:]], (4e-3, 1e-3, 5e-4)),
    "both": (["--use-checkpoint-opt_param-scheduler", *OWN, *OTHERS], (4e-3, 1e-3, 5e-4)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    flags = [*OWN, "--train-iters", "2", "--save", str(folder), "--save-interval", "2"]
    run_ranks(1, rates, MUON + flags, cpu=False, timeout=240)
    return folder


def resumed(job, folder, further):
    """Return what a job says of a run that goes on, with further flags."""
    flags = [*MUON, "--train-iters", "3", "--load", str(folder), *further]
    return run_ranks(1, job, flags, cpu=False, timeout=240)[0]


@pytest.mark.parametrize("name", CASES)
def test_each_group_takes_its_rates_from_one_place(saved, name):
    further, (muon, adam, decoupled) = CASES[name]
    expected = {("muon", muon), ("adam", adam), ("adam", decoupled)}
    assert resumed(rates, saved, further) == expected


def test_a_group_that_only_the_checkpoint_has_is_told(saved):
    assert "--decoupled-lr" in resumed(_error_of, saved, ["--use-checkpoint-opt_param-scheduler"])


@pytest.mark.parametrize("text", ["", "three"])
def test_a_tracker_file_that_names_nothing_ends_the_run(tmp_path, text):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    assert "must hold the number of an iteration" in resumed(_error_of, tmp_path, [])


def test_a_rate_that_would_rise_is_refused():
    import torch

    fields = {"optimizer": "muon", "lr": 1e-3, "min_lr": 1e-4, "muon_lr": 1e-5}
    with pytest.raises(ConfigurationError, match="below the lowest learning rate"):
        build_optimizer(torch.nn.Linear(4, 4), EmergingOptimizerConfig(**fields))
