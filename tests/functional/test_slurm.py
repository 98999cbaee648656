"""Jobs of ``scripts/slurm/pretrain.sbatch`` on a real Slurm of two nodes, one rank each."""

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.functional.saved_states import differing
from tests.functional.script import ROOT, STOCK_SCRIPT, TINY, losses
from tests.functional.slurm_cluster import NODES, cluster, idle_nodes, missing, slurm, wait_until
from tests.functional.test_launch import launched
from tests.harness import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

JOB = str(ROOT / "scripts" / "slurm" / "pretrain.sbatch")
STEPS, INTERVAL = 400, 50
FLAGS = [
    *TINY,
    *"--optimizer muon --use-distributed-optimizer --distributed-backend gloo".split(),
    *f"--train-iters {STEPS} --save-interval {INTERVAL}".split(),
]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass
class Job:
    """A job that has been submitted, in a folder of its own."""

    environment: dict[str, str]
    folder: Path
    number: str

    @property
    def state(self) -> str:
        return self._field("JobState")

    @property
    def restarts(self) -> int:
        return int(self._field("Restarts"))

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    @property
    def steps(self) -> list[int]:
        """Steps that were reported, in order, and again after a restart."""
        return [int(step) for step in re.findall(r"iteration +(\d+)/", self.log)]

    @property
    def last(self) -> Path:
        return self.folder / "run" / "checkpoints" / f"iter_{STEPS:07}"

    def _field(self, name: str) -> str:
        text = slurm(self.environment, "scontrol", "show", "job", self.number)
        found = re.search(rf"\b{name}=(\S+)", text)
        assert found is not None, text
        return found[1]

    def reach(self, step: int) -> None:
        """Wait until a step is reported."""
        wait_until(lambda: self.steps[-1:] >= [step] or self.state in ENDED, f"step {step}", 300)
        assert self.state == "RUNNING", self.log[-3000:]

    def go_on(self) -> None:
        """Wait until the job is in the queue again, and start it sooner than Slurm would."""
        wait_until(lambda: self.state == "PENDING", "the job is queued again", 120)
        slurm(self.environment, "scontrol", "update", f"jobid={self.number}", "StartTime=now")

    def end(self) -> str:
        """Wait for the job's end; return its state."""
        wait_until(lambda: self.state in ENDED, "the job ends", 400)
        return self.state


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield {
            **found,
            "PATH": f"{Path(sys.executable).parent}:{found['PATH']}",
            "MEGATRON_EOPT_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }


def submit(
    environment: dict[str, str], folder: Path, flags: Sequence[str] = FLAGS, **variables: str
) -> Job:
    folder.mkdir()
    environment = {**environment, "RUN_DIR": str(folder / "run"), **variables}
    options = ["--parsable", "--gpus-per-node=1", f"--output={folder / 'log'}", f"--chdir={ROOT}"]
    return Job(environment, folder, slurm(environment, "sbatch", *options, JOB, *flags))


@pytest.fixture(scope="module")
def undisturbed(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = submit(environment, tmp_path_factory.mktemp("whole") / "job")
    assert job.end() == "COMPLETED", job.log[-3000:]
    assert (job.steps, job.restarts) == (list(range(1, STEPS + 1)), 0)
    return job


def test_before_the_time_limit_it_saves_and_goes_on_bit_equal(environment, undisturbed, tmp_path):
    job = submit(environment, tmp_path / "job")
    job.reach(INTERVAL + 5)
    # what --signal=USR1@600 asks Slurm for, ten minutes before the limit
    slurm(environment, "scancel", "--signal=USR1", job.number)
    job.go_on()
    assert job.end() == "COMPLETED", job.log[-3000:]
    assert job.restarts == 1
    assert job.steps == undisturbed.steps, "no step was lost, none was done again"
    assert differing(job.last, undisturbed.last) == []


def _is_back(environment):
    # no answer while the node ends its work, or where it is back by itself
    with contextlib.suppress(RuntimeError):
        slurm(environment, "scontrol", "update", f"nodename={NODES[1]}", "state=resume")
    return idle_nodes(environment) == len(NODES)


def test_after_a_nodes_failure_it_loses_at_most_an_interval(environment, undisturbed, tmp_path):
    job = submit(environment, tmp_path / "job")
    job.reach(INTERVAL + 5)
    slurm(environment, "scontrol", "update", f"nodename={NODES[1]}", "state=down", "reason=test")
    wait_until(lambda: job.state != "RUNNING", "the job stops", 120)
    wait_until(lambda: _is_back(environment), "the node is back", 120)
    job.go_on()
    assert job.end() == "COMPLETED", job.log[-3000:]
    begun = next(n for n, (a, b) in enumerate(pairwise(job.steps)) if b <= a)
    assert 0 <= job.steps[begun] - job.steps[begun + 1] < INTERVAL
    assert differing(job.last, undisturbed.last) == []


@pytest.mark.parametrize("how", ["a path", "a module"])
def test_a_script_of_others_trains_as_through_the_launcher(environment, tmp_path, how):
    script = str(STOCK_SCRIPT) if how == "a path" else "-m tests.functional.upstream_style_gpt"
    flags = [*FLAGS, "--train-iters", "8", "--muon-momentum", "0.8", "--print-optimizer-routing"]
    job = submit(environment, tmp_path / "job", flags, SCRIPT=script)
    assert job.end() == "COMPLETED", job.log[-3000:]
    assert f"training program: -m megatron_eopt.launch {script}" in job.log
    assert "optimizer routing" in job.log, "the optimizer is this package's"
    outputs = run_ranks(2, launched, str(STOCK_SCRIPT), *flags, timeout=180, cpu=False)
    assert losses(job.log) == losses("".join(outputs)) != []


def test_a_load_of_another_run_is_for_the_first_start(environment, undisturbed, tmp_path):
    other = str(undisturbed.folder / "run" / "checkpoints")
    flags = [*FLAGS, "--train-iters", str(2 * STEPS), "--load", other]
    job = submit(environment, tmp_path / "job", [*flags, "--override-opt-param-scheduler"])
    job.reach(STEPS + 5)
    slurm(environment, "scancel", "--signal=USR1", job.number)
    job.go_on()
    assert job.end() == "COMPLETED", job.log[-3000:]
    assert job.steps == list(range(STEPS + 1, 2 * STEPS + 1)), "no step was done again"


def test_a_script_that_fails_is_not_queued_again(environment, tmp_path):
    job = submit(environment, tmp_path / "job", SCRIPT=str(tmp_path / "no such script.py"))
    assert job.end() == "FAILED"
    time.sleep(3)
    assert (job.state, job.restarts) == ("FAILED", 0)
