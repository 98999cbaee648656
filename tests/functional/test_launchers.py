"""The launchers for GPUs, as far as they go without; test_slurm.py runs those for Slurm."""

import os
import shlex

import pytest

from tests.functional.test_commands import shell

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


def test_a_slurm_job_without_a_folder_says_so():
    done = shell("env -u RUN_DIR bash scripts/slurm/pretrain.sbatch")
    assert done.returncode != 0
    assert "set RUN_DIR to a folder" in done.stderr
