"""The training script at tiny sizes on two CPU processes."""

import os
import subprocess
import sys

import pytest

from tests.functional.script import ROOT, SCRIPT, TINY, losses, train
from tests.harness import RankError


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_trains_with_a_loss_scale(optimizer):
    # float32 and bfloat16, and all layouts, are functional cases
    output = train("--optimizer", optimizer, "--fp16", "--initial-loss-scale", "256")
    values = [float(loss) for loss in losses(output)]
    assert len(values) == 6
    # Mock data repeats a simple pattern: a few steps already learn some of it.
    assert values[-1] < values[0] - 0.05


def start(*flags: str) -> subprocess.CompletedProcess[str]:
    """Start the script as a user does."""
    environment = {**os.environ, "MEGATRON_EOPT_DEVICE": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return subprocess.run(
        [*command, str(SCRIPT), *TINY, *flags],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
    )


def test_two_runs_with_one_seed_print_the_same_losses():
    first, second = start("--optimizer", "muon"), train("--optimizer", "muon")
    assert first.returncode == 0, first.stderr[-3000:]
    assert len(losses(first.stdout)) == 6
    assert losses(first.stdout) == losses(second) == losses(train("--optimizer", "muon"))


def test_what_needs_a_gpu_is_refused_with_the_flag():
    with pytest.raises(RankError, match="--context-parallel-size=2: context parallelism is done"):
        train("--context-parallel-size", "2")
