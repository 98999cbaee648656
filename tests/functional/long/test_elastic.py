"""A worker dies, torchrun starts all again, and the run goes on as if nothing had happened."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.saved_states import differing
from tests.functional.script import ROOT, SCRIPT, TINY
from tests.harness.long_results import record_faults

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

DEATHS = 3
DIES = """
import os
from megatron_eopt.wrappers.chain import OptimizerChain

attempt, steps = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), []
if os.environ["RANK"] == str(attempt % 2) and attempt < {deaths}:
    plain = OptimizerChain.step
    def step(self):
        steps.append(None)
        if len(steps) == 3:  # one step after a save
            os._exit(1)
        return plain(self)
    OptimizerChain.step = step
"""
"""In each of the first attempts another rank dies."""


def run(folder: Path, *flags: str) -> str:
    """Train with torchrun; return the loss on the test set."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(DEATHS), "--standalone", str(SCRIPT), *TINY]
    command += ["--optimizer", "muon", "--use-distributed-optimizer", "--save-interval", "2"]
    command += ["--save", str(folder), "--load", str(folder), "--train-iters", "10", *flags]
    # torch 2.15 leaves addresses of dead workers in a store that the next attempt uses
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "MEGATRON_EOPT_DEVICE": "cpu"}
    # a file, because what a dead worker leaves behind may keep a pipe open
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        subprocess.run(
            command, cwd=ROOT, env=os.environ | own, stdout=out, stderr=out, check=True, timeout=600
        )
    return re.findall(r"on test set \| lm loss value: (\S+)", log.read_text())[-1]


def test_torchrun_restarts_all_when_a_worker_has_died(tmp_path, record_property):
    hook = tmp_path / "dies.py"
    hook.write_text(DIES.format(deaths=DEATHS))
    whole, restarted = tmp_path / "undisturbed", tmp_path / "restarted"
    assert run(whole) == run(restarted, "--import", str(hook))
    assert not differing(whole / "iter_0000010", restarted / "iter_0000010")
    outcome = {"resumed from the last complete checkpoint": DEATHS}
    record_faults("a worker of torchrun dies in a step", outcome, record_property)
