"""The launchers for GPUs and for Slurm, as far as they go without either."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.functional.test_commands import ROOT, shell

GPU = "./scripts/pretrain_gpu.sh"


def dry_run(*flags: str, **variables: str) -> list[str]:
    done = shell(shlex.join([GPU, "--dry-run", *flags]), **variables)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def test_flags_pass_through_after_the_defaults():
    command = dry_run("--lr", "5e-4", "--out", "a folder", GPUS="4")
    assert command[:4] == ["torchrun", "--standalone", "--nproc-per-node", "4"]
    assert command[-2:] == ["--lr", "5e-4"]
    assert command[command.index("--save") + 1] == "a folder/checkpoints"
    assert command[command.index("--global-batch-size") + 1] == "128"
    assert "--mock-data" in command


@pytest.mark.parametrize(
    "flag", ["--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path"]
)
def test_own_data_replaces_made_up_data(flag):
    assert "--mock-data" not in dry_run(flag, "data", GPUS="1")
    assert "--mock-data" not in dry_run(f"{flag}=data", GPUS="1")


@pytest.mark.parametrize(
    ("visible", "count"),
    [("0,2,5", "3"), ("3", "1"), ("GPU-8932f937,MIG-41", "2"), ("0,1,-1,2", "2"), ("0,,1", "1")],
)
def test_visible_gpus_are_counted(visible, count):
    assert dry_run(CUDA_VISIBLE_DEVICES=visible)[3] == count


@pytest.mark.parametrize("visible", ["", "-1", "-1,0"])
def test_without_a_gpu_it_names_the_quickstart(tmp_path, visible):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = shell(f"PATH={shlex.quote(path)} CUDA_VISIBLE_DEVICES={visible} {GPU}")
    assert done.returncode == 1
    assert "quickstart.sh" in done.stderr


# A rank that takes longer over its checkpoint than torchrun would wait, and ends well.
RANK = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
done = os.path.join(os.environ["RUN_DIR"], "done")
print("flags", *sys.argv[1:], flush=True)
open(os.path.join(os.environ["RUN_DIR"], "started" + os.environ["RANK"]), "w").close()
while not asked and not os.path.exists(done):
    time.sleep(0.05)
if asked:
    time.sleep(2)
    open(done, "w").close()
    print("saved", flush=True)
"""

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "$@" >>"$RUN_DIR/scontrol"
[[ $1 != show ]] || echo 127.0.0.1
"""


@pytest.fixture
def slurm(tmp_path) -> tuple[dict[str, str], Path]:
    """A place with stand-ins for Slurm's commands, and its run's folder."""
    tools, run = tmp_path / "tools", tmp_path / "run"
    tools.mkdir()
    run.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tmp_path / "rank.py").write_text(RANK)
    variables = {
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RUN_DIR": str(run),
        "SCRIPT": str(tmp_path / "rank.py"),
        "GPUS_PER_NODE": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": "1",
        # far less than the ranks take: whoever is stopped by torchrun does not save
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "0",
    }
    return {**os.environ, **variables}, run


def job(environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", "scripts/slurm/pretrain.sbatch", "--optimizer", "muon"],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def descendants(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    children: dict[int, list[int]] = {}
    for line in listing.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


@pytest.mark.long
def test_a_slurm_job_saves_when_signalled_is_queued_again_and_then_ends(slurm):
    environment, run = slurm
    first = job(environment)
    try:
        deadline = time.monotonic() + 120
        while not all((run / f"started{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.1)
        # as Slurm does it: to every process of the step, not to the batch script
        for pid in descendants(first.pid):
            os.kill(pid, signal.SIGUSR1)
        output = first.communicate(timeout=60)[0]
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
    assert first.returncode == 0, output
    assert output.count("saved") == 2
    flags = re.search(r"flags (.*)", output)[1]
    checkpoints = run / "checkpoints"
    assert f"--save {checkpoints} --load {checkpoints}" in flags
    assert "--exit-signal-handler" in flags
    assert flags.endswith("--optimizer muon")
    assert f"requeue {os.getpid()}" in (run / "scontrol").read_text()

    (run / "scontrol").unlink()
    second = job(environment)
    output = second.communicate(timeout=120)[0]
    assert second.returncode == 0, output
    assert "requeue" not in (run / "scontrol").read_text()


@pytest.mark.long
def test_a_slurm_job_that_fails_is_not_queued_again(slurm):
    environment, run = slurm
    failing = job({**environment, "SCRIPT": str(run / "no such script.py")})
    output = failing.communicate(timeout=120)[0]
    assert failing.returncode != 0, output
    assert "requeue" not in (run / "scontrol").read_text()


def test_a_slurm_job_without_a_folder_says_so(slurm):
    environment, _ = slurm
    del environment["RUN_DIR"]
    output = job(environment).communicate(timeout=20)[0]
    assert "set RUN_DIR to a folder" in output


def test_the_dockerfile_copies_what_exists_and_keeps_torch():
    text = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.search(
        r"^ARG NGC_TAG=\d\d\.\d\d-py3\nFROM nvcr\.io/nvidia/pytorch:\$\{NGC_TAG\}$", text, re.M
    )
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    assert copied
    for name in (name for names in copied for name in names):
        assert (ROOT / name).exists(), name
    (install,) = re.findall(r"pip install .*", text)
    assert "--constraint /opt/image-torch.txt" in install
